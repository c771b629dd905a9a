"""Attention whose K and V are split over the ranks of a process group: each attends to what it holds, one collective merges the parts.

torch.distributed moves the bytes: by its symmetric memory between the GPUs of a host, by NCCL beyond it and for large parts,
by gloo between CPUs. Every rank passes the same queries and the same selection and gets the same result, bit for bit. Nothing
about a shard's place needs to be known: block ids, lengths, valid bits and causal positions, and so the masks, stay those of
the whole sequence. Heads split over ranks need none of this: each rank runs the ordinary operation on its own heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import PagedArguments
from ..engines.held_paged import HeldDesign
from ..engines.shard_kernels import HeldLists, Inboxes, exchange_source, gathered_source, held_source, load_kernels, with_held_blocks
from ..errors import CaptureError, CudnnGraphsError, problem
from ..planning import Plan, PlanStore, store_or_default
from ..runtime.devices import DeviceFacts, device_facts
from ..runtime.streams import current_raw_stream, is_capturing, on_device
from . import checks
from .gathered_parts import GatheredParts, PartLayout
from .paged_block_sparse import Result
from .paged_signature import DTYPES, PagedBlockSparseSignature, PagedKVCache
from .peer_parts import PeerParts, gather_objects, open_inboxes
from .query_sparse import QuerySparseSignature


class ShardedPagedAttention:
    """Paged block-sparse attention over a KV cache that is split over ranks by whole blocks and whole pages.

    Each rank has a cache of its own pages, and a page table of the whole sequence in which the pages of other ranks are
    negative (-1). A block belongs to the rank that has its first page; all pages of a block must be there. Which rank holds what
    is free, request by request: round robin, one stretch each, one rank everything, and it may change from run to run.

    Runs of one object share its scratch memory, so their order must be one: on one stream, or by events. For two
    micro-batches in flight make two objects of the same signature; they share the plan. `exchange` says how parts move: "peer memory",
    or "all-gather" with the reason.

    Making one is collective: every rank of `group` (None: the default group) does it, with equal signatures. batch_size,
    max_seq_len_kv and max_blocks_per_row are those of the whole; page_stride, kv_layout and page_table those of this rank's cache.
    device: None for the current CUDA device, or the CPU. Raises as planning does; ValueError where ranks disagree,
    OverflowError where the lists of all rows exceed int32, RuntimeError without a process group or under CUDA graph capture.
    """

    def __init__(self, signature: PagedBlockSparseSignature, *, group: Any = None, device: Any = None, engine: str | None = None,
                 store: PlanStore | None = None) -> None:
        if not isinstance(signature, PagedBlockSparseSignature):
            raise TypeError(problem("signature", type(signature).__name__, "a PagedBlockSparseSignature", "describe the whole attention by one"))
        if is_capturing():
            raise CaptureError(problem("ShardedPagedAttention", "a call under CUDA graph capture", "plans made before capture", "make it before, run() inside"))
        heads = 1 if signature.shared_pattern else signature.num_kv_heads
        if (entries := signature.batch_size * heads * signature.rows * signature.max_blocks_per_row) > checks.INT32_MAX:  # type: ignore[operator]
            raise OverflowError(problem("max_blocks_per_row", f"{entries} blocks in all rows", f"at most {checks.INT32_MAX}", "lower it, or split the batch"))
        self.signature, self.group, self.device = signature, group, _member(group, device)
        _agree({name: value for name, value in signature.facts().items() if name not in ("page_stride", "kv_layout", "page_table")}, group, self.device)
        store = store_or_default(store)
        self._cubins = store.cubins
        self.plan: Plan = store.get(signature.replace(return_lse=True), self.device, engine)
        self._held = HeldDesign.of(self.plan.signature.lower(), self.device, dist.get_world_size(group)) if self.plan.engine == "portable" else None
        if self._held is None:
            self._lists = HeldLists.of(signature.batch_size, heads, signature.rows, signature.max_blocks_per_row,  # type: ignore[arg-type]
                                       self.device.torch_device)
        layout, device = self._layout(signature.batch_size), self.device.torch_device
        opened = open_inboxes(layout, self.device, group)
        self._inboxes = opened if isinstance(opened, Inboxes) else None
        if self._inboxes is not None:
            self.exchange, parts, merge_kernel = "peer memory", 1, exchange_source
        else:
            self.exchange, parts, merge_kernel = f"all-gather: {opened}", dist.get_world_size(group), gathered_source
        self._storage = torch.empty(parts * layout.nbytes, dtype=torch.uint8, device=device)
        self._parts: dict[int, GatheredParts | PeerParts] = {}      # by batch size
        taken_off = held_source(signature.rows) if self._held is None else self._held.kernel
        load_kernels((taken_off, merge_kernel(layout.dtype, signature.head_dim)), self.device, self._cubins)

    def _layout(self, batch: int) -> PartLayout:
        s = self.signature
        return PartLayout((batch, s.seq_len_q, s.num_qo_heads, s.head_dim), DTYPES[s.dtype])

    def _parts_of(self, batch: int) -> GatheredParts | PeerParts:
        parts = self._parts.get(batch)
        if parts is None:
            layout = self._layout(batch)
            if self._inboxes is None:
                parts = GatheredParts(layout, self.device, self.group, self._storage)
            else:
                parts = PeerParts(layout, self.device, self._inboxes, self._storage)
            self._parts[batch] = parts
        return parts

    def _attend(self, whole: PagedArguments, workspace: torch.Tensor | None, validate: bool) -> None:
        """To what is held of the whole's lists."""
        if self._held is None:
            self.plan.launch(with_held_blocks(whole, self._lists, self.device, self._cubins), workspace, validate=validate)
            return
        with on_device(self.device):
            self._held.launch(self._cubins.loaded(self._held.kernel, self.device), whole, current_raw_stream(self.device))

    def run(self, q: torch.Tensor, paged_kv_cache: PagedKVCache, paged_kv_indptr: torch.Tensor | None, paged_kv_indices: torch.Tensor | None,
            seq_lens_kv: torch.Tensor, block_indptr: torch.Tensor, block_indices: torch.Tensor, *, block_tables: torch.Tensor | None = None,
            kv_valid_bits: torch.Tensor | None = None, sm_scale: float | None = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
            workspace: torch.Tensor | None = None, validate: bool = True) -> Result:
        """As `BlockSparsePagedTSWrapper.run`, with the arguments of the whole but for the cache and the negative pages. Collective.

        Blocks held elsewhere are taken off the lists on the device, and nothing of them is looked up. A row that is bad by its
        range, ids or length is zero with lse -inf; one that is bad by a page of one rank lacks that rank's part. Never
        synchronizes or allocates more than the outputs that it is not given; capturable in a CUDA graph, on every rank alike.
        Returns out, or (out, lse). 16-bit parts are merged in fp32, which costs one more rounding of out.
        """
        bound = self.signature.bind(self.device, q, paged_kv_cache, paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_indptr, block_indices,
                                    block_tables=block_tables, kv_valid_bits=kv_valid_bits, sm_scale=sm_scale, out=out, lse=lse, validate=validate)
        parts = self._parts_of(bound.q.shape[0])
        self._attend(dataclasses.replace(bound, out=parts.out, lse=parts.lse), workspace, validate)
        parts.merge_into(bound.out, bound.lse, self._cubins)
        return bound.result

    def check_shards(self, paged_kv_indptr: torch.Tensor | None, paged_kv_indices: torch.Tensor | None, seq_lens_kv: torch.Tensor, *,
                     block_tables: torch.Tensor | None = None) -> None:
        """ValueError on every rank unless each live page is held by exactly one, with all pages of its block. Collective, waits for the device.

        What `run` trusts: a page that two ranks hold counts twice, one that none holds is left out.
        """
        held = self._held_pages(paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_tables)
        holders = held.to(torch.int32)
        per_block = max(self.signature.kv_block_size // self.signature.page_size, 1)
        blocks = torch.nn.functional.pad(held, (0, -held.shape[1] % per_block)).unflatten(1, (-1, per_block))
        live = torch.arange(held.shape[1], device=held.device) < self._live_pages(seq_lens_kv)[:, None]
        live_blocks = torch.nn.functional.pad(live, (0, -held.shape[1] % per_block)).unflatten(1, (-1, per_block))
        torn = (live_blocks & (blocks != blocks[..., :1])).sum(dtype=torch.int32)
        words = torch.cat([holders.flatten(), torn[None]])
        dist.all_reduce(words, group=self.group)
        wrong = (live & (words[:-1].view(held.shape) != 1)).nonzero()
        if wrong.numel():
            request, page = wrong[0].tolist()
            raise ValueError(problem("block_tables" if paged_kv_indptr is None else "paged_kv_indices",
                                     f"{int(words[request * held.shape[1] + page])} holders of page {page} of request {request}",
                                     "one rank with its page id, -1 on the others", "give every live page to one rank"))
        if int(words[-1]):
            raise ValueError(problem("kv_block_size", f"{int(words[-1])} pages apart from the first of their block", "blocks whole on one rank",
                                     f"split the cache at multiples of {max(self.signature.kv_block_size, self.signature.page_size)} tokens"))

    def _live_pages(self, seq_lens_kv: torch.Tensor) -> torch.Tensor:
        return (seq_lens_kv.long() + self.signature.page_size - 1) // self.signature.page_size

    def _held_pages(self, page_indptr: torch.Tensor | None, page_indices: torch.Tensor | None, seq_lens: torch.Tensor,
                    block_tables: torch.Tensor | None) -> torch.Tensor:
        """[B, max pages] bool: the live pages that this rank has."""
        pages = -(-self.signature.max_seq_len_kv // self.signature.page_size)
        held = torch.zeros(len(seq_lens), pages, dtype=torch.bool, device=self.device.torch_device)
        offsets = None if page_indptr is None else page_indptr.tolist()
        for b, live in enumerate(self._live_pages(seq_lens).clamp(max=pages).tolist()):
            row = block_tables[b] if offsets is None else page_indices[offsets[b]:offsets[b + 1]]  # type: ignore[index]
            held[b, :min(live, len(row))] = row[:live] >= 0
        return held


def sharded_qsa_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sel_blocks: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor,
                        blk_base: torch.Tensor, tok_base: torch.Tensor, block_first: torch.Tensor, block_last: torch.Tensor, scale: float = 1 / 16, *,
                        first_token: int, group: Any = None, engine: str | None = None,
                        store: PlanStore | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qsa_forward` with K and V split over ranks by tokens: this rank's k and v [n, Hkv, 256] are tokens first_token .. first_token + n - 1.

    Everything else describes the whole packed batch of T tokens and is the same on every rank. The shards cover the T tokens
    without overlap; their lengths are free, and may cut a sequence or a block; n may be 0. Collective.
    Returns out, out_fp32, lse as `qsa_forward`, the same bits on every rank; parts are exchanged in fp32, so nothing is lost
    to it. Runs the ordinary plan ceil(T / n) times: the operation wants as many queries as keys. There is no indexed
    form: it drops ids above a query's place, which a shard shifts.
    Raises as `qsa_forward`; ValueError for first_token outside the batch, RuntimeError without a process group.
    """
    for name, value in (("q", q), ("k", k)):
        if checks.tensor(name, value).dim() != 3:
            raise ValueError(problem(name, f"rank {value.dim()}", "[tokens, heads, 256]", "pack the batch along dim 0"))
    device = _member(group, q.device)
    store = store_or_default(store)
    total, held = q.shape[0], k.shape[0]
    checks.integer("first_token", first_token, least=0, fix="pass the place of k[0] in the batch")
    if first_token + held > total:
        raise ValueError(problem("first_token", f"{first_token} with {held} tokens of K", f"at most {total} in all",
                                 "q and the metadata cover the whole batch"))
    out, out_fp32 = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((q.shape[1], total), dtype=torch.float32, device=q.device)
    parts = GatheredParts(PartLayout(tuple(q.shape), torch.float32), device, group)
    if held:
        plan = store.get(QuerySparseSignature(q.shape[1], k.shape[1], "bitmap", held), device, engine)
        local = lo - first_token, hi - first_token, blk_base, tok_base - first_token
        blocks = block_first - first_token, block_last - first_token
        for begin in _chunks(total, held):
            rows = slice(begin, begin + held)
            _, _, parts.lse[:, rows] = plan.run(q[rows], k, v, sel_blocks[rows], *(x[rows] for x in local), *blocks, scale, out=out[rows],
                                                out_fp32=parts.out[rows])
    else:
        parts.lse.fill_(float("-inf"))
    parts.merge_into(out_fp32, lse, store.cubins)
    return out.copy_(out_fp32), out_fp32, lse


def _chunks(total: int, size: int) -> list[int]:
    """Where chunks of `size` begin that cover `total`; the last one may overlap its neighbour, whose rows it computes alike."""
    return [min(begin, total - size) for begin in range(0, total, size)]


def _member(group: Any, device: Any) -> DeviceFacts:
    """The device, once it is known that this process is in the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise CudnnGraphsError(problem("group", "no process group", "torch.distributed initialized",
                                       "call torch.distributed.init_process_group in every process"))
    if dist.get_rank(group) < 0:
        raise CudnnGraphsError(problem("group", "a group that this process is not in", "one that it is in", "call it on the group's ranks only"))
    return device_facts(device)


def _agree(facts: dict[str, Any], group: Any, device: DeviceFacts) -> None:
    """ValueError on every rank where ranks were given different facts."""
    everyone = gather_objects(facts, group, device)
    for rank, theirs in enumerate(everyone):
        if differing := {name: (value, theirs.get(name)) for name, value in everyone[0].items() if value != theirs.get(name)}:
            raise ValueError(problem("signature", f"{differing} on ranks 0 and {rank}", "equal facts on every rank", "plan the same attention everywhere"))
