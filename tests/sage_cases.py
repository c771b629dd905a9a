"""Sage calls to test with: random quantized tensors, block lists with every oddity, and a V whose every byte names its token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cudnn_graphs.arguments import SageArguments

E4M3_NAN = 0x7F
LENGTHS = (1, 63, 64, 65, 127, 129, 200)


@dataclass
class SageCase:
    """Facts of one call; `make` draws its tensors."""

    batch: int = 1
    heads: int = 2
    seq_q: int = 130
    seq_k: int = 330
    capacity: int = 5
    count: int = 4
    counts: bool = False                # per-row counts, some outside [0, capacity]
    sizes_rank: int | None = None
    v_layout: str = "natural"
    uniform: bool = False
    contiguous: bool = False
    bad_ids: bool = False
    v_largest: float = 448.0
    sharpness: float = 1.0              # of the softmax
    scale: float = 128 ** -0.5
    seed: int = 0
    device: str = "cpu"
    q: torch.Tensor = field(init=False, repr=False)
    k: torch.Tensor = field(init=False, repr=False)
    v: torch.Tensor = field(init=False, repr=False)

    def make(self):
        g = torch.Generator().manual_seed(self.seed)
        b, h, blocks, rows = self.batch, self.heads, -(-self.seq_k // 64), -(-self.seq_q // 64)
        self.q, self.k = (torch.randint(-127, 128, (b, h, n, 128), generator=g, dtype=torch.int8) for n in (self.seq_q, self.seq_k))
        v = torch.randn(b, h, 128, blocks * 64, generator=g)
        self.v = (v * (self.v_largest / v.abs().amax())).to(torch.float8_e4m3fn)
        spread = self.sharpness / (73.0 * 73.0 * 128 ** 0.5) * 128 ** 0.5
        self.q_scale = (torch.rand(b, h, -(-self.seq_q // 128) * 4, generator=g) + 0.5) * spread
        self.k_scale = torch.rand(b, h, blocks, generator=g) + 0.5
        self.v_scale = (torch.rand(b, h, 128, generator=g) + 0.5) / self.v_largest
        self.index = torch.randint(0, blocks, (b, h, rows, self.capacity), generator=g, dtype=torch.int32)
        if self.bad_ids:
            odd = torch.tensor([-1, blocks, -2**31, 2**31 - 1, blocks + 7], dtype=torch.int32)
            where = torch.rand(self.index.shape, generator=g) < 0.4
            self.index = torch.where(where, odd[torch.randint(0, 5, self.index.shape, generator=g)], self.index)
        self.nums = None
        if self.counts:
            self.nums = torch.randint(0, self.capacity + 1, (b, h, rows), generator=g, dtype=torch.int32)
            for i, n in enumerate((0, self.capacity, -1, self.capacity + 1, 2**31 - 1, -2**31)):
                if i < rows:
                    self.nums[0, 0, i] = n
        self.sizes = None
        if self.sizes_rank is not None:
            shape = {1: (blocks,), 2: (b, blocks), 3: (b, h, blocks)}[self.sizes_rank]
            self.sizes = torch.randint(-1, 67, shape, generator=g, dtype=torch.int32)
        return self

    def poison(self):
        """NaN in every byte of V that no query may see: past the last token, and past every block's size where all heads share it."""
        logical = torch.arange(self.v.shape[-1])
        size = torch.full((self.batch, self.heads, self.v.shape[-1] // 64), 64)
        if self.sizes is not None:
            size = torch.minimum(size, (self.sizes if self.sizes.dim() != 2 else self.sizes[:, None]).long().expand(size.shape))
        seen = (logical % 64 < size.repeat_interleave(64, -1)) & (logical < self.seq_k)
        slot_of = logical if self.v_layout == "natural" else logical // 16 * 16 + torch.tensor([0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14,
                                                                                                15])[logical % 16]
        raw = self.v.view(torch.uint8)
        unseen_slots = torch.zeros_like(seen)
        unseen_slots[..., slot_of] = ~seen
        raw[unseen_slots[:, :, None].expand(raw.shape)] = E4M3_NAN
        return self

    def one_hot(self):
        """Keys so far apart that each query sees exactly one, and a V whose 128 channels spell the token: out is V's column, exactly."""
        g = torch.Generator().manual_seed(self.seed + 1)
        b, h = self.batch, self.heads
        self.k = (torch.randint(0, 2, self.k.shape, generator=g) * 254 - 127).to(torch.int8)
        self.target = torch.full((b, h, self.seq_q), -1)
        from oracle_sage import row_tokens
        for i in range(b):
            for j in range(h):
                for r in range(self.index.shape[2]):
                    tokens = sorted(set(row_tokens(self, i, j, r)))
                    span = range(64 * r, min(64 * r + 64, self.seq_q))
                    if tokens:
                        self.target[i, j, span.start:span.stop] = torch.tensor([tokens[(7 * q + 3 * r) % len(tokens)] for q in span])
                        self.q[i, j, span.start:span.stop] = self.k[i, j, self.target[i, j, span.start:span.stop]]
        self.q_scale.fill_(1.0)
        self.k_scale.fill_(1.0)
        self.v_scale.fill_(1.0)
        self.scale = 1.0 / 127
        token = torch.arange(self.v.shape[-1])
        code = (token[None, :] * 2654435761 >> (torch.arange(128)[:, None] % 24)) % 120 + 1           # never a NaN byte
        self.code = code.to(torch.uint8)
        slots = token if self.v_layout == "natural" else token // 16 * 16 + torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])[token % 16]
        self.v = self.code[:, slots].expand(b, h, -1, -1).contiguous().view(torch.float8_e4m3fn)
        return self

    def to(self, device):
        for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "index", "nums", "sizes"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.to(device))
        self.device = device
        return self

    def arguments(self):
        """As the operation binds them, outputs full of NaN."""
        out = torch.full(self.q.shape, float("nan"), dtype=torch.bfloat16, device=self.q.device)
        lse = torch.full(self.q.shape[:3], float("nan"), device=self.q.device)
        return SageArguments(self.q, self.k, self.v, self.q_scale, self.k_scale, self.v_scale, out, lse, self.index, None if self.uniform else self.nums,
                             self.count,
                             self.sizes, self.scale, self.contiguous, self.v_layout)


def table():
    """One case a rule, both layouts."""
    for layout in ("natural", "interleaved16"):
        for n in LENGTHS:
            yield dict(seq_q=n, seq_k=200, v_layout=layout, seed=n)
            yield dict(seq_q=65, seq_k=n, v_layout=layout, seed=n)
        for count in (0, 1, 2, 3, 5):
            yield dict(count=count, v_layout=layout, batch=2)
        for rank in (1, 2, 3):
            yield dict(sizes_rank=rank, v_layout=layout, batch=2, seq_q=200)
        yield dict(counts=True, seq_q=700, v_layout=layout)
        yield dict(counts=True, uniform=True, v_layout=layout)
        yield dict(uniform=True, contiguous=True, v_layout=layout, capacity=9, count=8)
        yield dict(uniform=True, contiguous=True, bad_ids=True, v_layout=layout, count=3)
        yield dict(bad_ids=True, counts=True, sizes_rank=3, batch=2, seq_q=500, v_layout=layout)
        yield dict(v_largest=2.25, v_layout=layout)
        yield dict(sharpness=30.0, v_layout=layout)
        yield dict(sharpness=1e-3, v_layout=layout)
        yield dict(capacity=70, count=67, seq_k=4033, seq_q=64, heads=3, v_layout=layout)
