"""Small launches of every kernel of packed query-sparse attention for compute-sanitizer, checked against float64. Not a pytest file.

`compute-sanitizer --report-api-errors no python tests/qsa_sanitizer_cases.py`: cuda.bindings asks the driver for entry points it lacks.
"""

from __future__ import annotations

import pytest
import torch
from oracle_qsa import attend_dense, visible_by_bitmap, visible_by_indices
from test_qsa_gpu import ENGINES, batch, check, run_bitmap, skip_unserved, store

from cudnn_graphs.ops.query_sparse import qsa_indexed_forward

CASES = (((12, 1), 3, 60, 0.6, {}), ((24, 2), 5, 30, 0.5, {"windows": True, "shift": 3}), ((3, 1), 1, 120, 1.0, {"causal": False, "shift": 1}))


def main() -> None:
    ran = 0
    for heads, sequences, longest, density, more in CASES:
        q, k, v, sel, metadata = batch(heads, sequences, longest, density, **more)
        want = attend_dense(q, k, v, visible_by_bitmap(sel, metadata), 1 / 16)
        for engine in ENGINES:
            try:
                skip_unserved(engine)
                check(run_bitmap(engine, q, k, v, sel, metadata), *want)
                run_bitmap(engine, q, k, torch.full_like(v, float("nan")), sel, metadata)     # every packed item goes query by query after all
            except pytest.skip.Exception:
                continue
            ran += 2
        indices = torch.arange(40, dtype=torch.int32, device="cuda").repeat(len(q), 1)
        check(qsa_indexed_forward(q, k, v, indices, store=store()), *attend_dense(q, k, v, visible_by_indices(indices), 1 / 16))
        ran += 1
    torch.cuda.synchronize()
    print(f"ran {ran} launches, all right")


if __name__ == "__main__":
    main()
