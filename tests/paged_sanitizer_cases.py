"""Small launches of every kernel for compute-sanitizer: `compute-sanitizer python tests/paged_sanitizer_cases.py`. Not a pytest file."""

from __future__ import annotations

import torch
from oracle_paged import assert_close, paged_attention
from paged_cases import PagedCase, by_query

from cudnn_graphs import PlanStore

CASES = (
    dict(),
    dict(seq_len_q=13, mask_type="causal", bits=True, kv_layout="combined", dtype=torch.float16, max_seq_len_kv=150),
    dict(num_qo_heads=8, num_kv_heads=1, seq_len_q=1, q_block_size=1, max_seq_len_kv=700, kv_block_size=64, page_size=64, head_dim=128),
    dict(seq_len_q=70, q_block_size=64, num_qo_heads=4, num_kv_heads=2, head_dim=128, kv_block_size=64, page_size=32, max_seq_len_kv=330, strided_q=True),
    dict(seq_len_q=8, head_dim=256, page_table="block_tables", shared_pattern=True, padded_pages=3, page_size=64, kv_block_size=8),
)


def main() -> None:
    store, ran = PlanStore(None), 0
    for engine in ("portable", "sm90", "cudnn"):
        for facts in CASES:
            case = PagedCase(device="cuda", **facts).make()
            positional, keywords = case.arguments()
            try:
                plan = store.get(case.signature(), "cuda", engine)
            except NotImplementedError:
                continue
            out, lse = by_query(*plan.run(*positional, **keywords))
            assert_close(out, *paged_attention(case)[:1], lse, paged_attention(case)[1])
            ran += 1
    case = PagedCase(device="cuda").make()
    case.one_shot(store=store)
    print(f"ran {ran} launches and one inspection, all right")


if __name__ == "__main__":
    main()
