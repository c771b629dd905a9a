"""Small launches of every Sage kernel for compute-sanitizer: `compute-sanitizer python tests/sage_sanitizer_cases.py`. Not a pytest file."""

from __future__ import annotations

import torch
from oracle_sage import errors, sage_attention
from sage_cases import SageCase

from cudnn_graphs import PlanStore, quantize_sage_qkv, sage_block_sparse_attention

CASES = (dict(), dict(seq_q=65, seq_k=129, v_layout="interleaved16"), dict(bad_ids=True, counts=True, sizes_rank=3, batch=2, seq_q=200), dict(seq_q=1, seq_k=1),
         dict(uniform=True, contiguous=True, bad_ids=True))


def main() -> None:
    store, ran = PlanStore(None), 0
    for facts in CASES:
        case = SageCase(**facts).make().poison()
        want = sage_attention(case)
        case.to("cuda")
        for engine in ("portable", "sm90"):
            for return_lse in (True, False):
                try:
                    got = sage_block_sparse_attention(case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale, case.index, case.count, case.sizes,
                                                      case.nums, case.scale, uniform_block_count=case.uniform, contiguous_block_indices=case.contiguous,
                                                      v_layout=case.v_layout, return_lse=return_lse, engine=engine, store=store)
                except NotImplementedError:
                    continue
                assert errors(*(got if return_lse else (got, want[1])), *want)[0] < 4e-2
                ran += 1
    for layout in ("natural", "interleaved16"):
        quantize_sage_qkv(*(torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16) for n in (70, 200, 200)), v_layout=layout)
        quantize_sage_qkv(*(torch.randn(1, 2, 128, n, device="cuda").mT for n in (70, 200, 200)), v_layout=layout)
    torch.cuda.synchronize()
    print(f"ran {ran} launches and 4 quantizations, all right")


if __name__ == "__main__":
    main()
