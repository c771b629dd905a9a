"""The demo's paged KV cache: pages handed out in random order, as a busy server's allocator would."""

from __future__ import annotations

import torch


class PagedCache:
    """K and V of several requests, each [P, heads, page_size, head_dim], and the mean key of every block of tokens.

    Whatever was never written is NaN here, as it may be in a server's memory: the attention must not care.
    """

    def __init__(self, requests: int, max_tokens: int, page_size: int, block_size: int, heads: int, head_dim: int, device: torch.device) -> None:
        per_request = -(-max_tokens // page_size)
        pages = requests * per_request + 7
        self.k = torch.full((pages, heads, page_size, head_dim), float("nan"), dtype=torch.bfloat16, device=device)
        self.v = self.k.clone()
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.block_tables = order[:requests * per_request].view(requests, per_request).int().to(device)
        self.lengths = [0] * requests
        self.page_size, self.block_size = page_size, block_size
        self._key_sums = torch.zeros(requests, -(-max_tokens // block_size), heads, head_dim, device=device)

    def append(self, request: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, heads, head_dim]: the next n tokens of a request."""
        page, slot, token = self._places(request, self.lengths[request], len(k))
        self.k[page, :, slot], self.v[page, :, slot] = k, v
        self._key_sums[request].index_add_(0, token // self.block_size, k.float())
        self.lengths[request] += len(k)

    def read(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [heads, length, head_dim] in fp32, in the order of the tokens."""
        page, slot, _ = self._places(request, 0, self.lengths[request])
        return self.k[page, :, slot].transpose(0, 1).float(), self.v[page, :, slot].transpose(0, 1).float()

    def pooled_keys(self, request: int) -> torch.Tensor:
        """[heads, blocks, head_dim]: the mean key of each live block."""
        length, size = self.lengths[request], self.block_size
        blocks = -(-length // size)
        counts = torch.full((blocks, 1, 1), size, device=self.k.device)
        counts[-1] = length - (blocks - 1) * size
        return (self._key_sums[request, :blocks] / counts).transpose(0, 1)

    def seq_lens(self, requests: list[int]) -> torch.Tensor:
        return torch.tensor([self.lengths[r] for r in requests], dtype=torch.int32, device=self.k.device)

    def _places(self, request: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token = torch.arange(first, first + count, device=self.k.device)
        return self.block_tables[request, token // self.page_size].long(), token % self.page_size, token
