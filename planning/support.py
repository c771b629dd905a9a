"""The support table: which engine serves which descriptor on which device, and why not otherwise.

Errors, the accept-and-reject tests and the README's matrix are all made from `REQUIREMENTS`. An engine
serves a descriptor when every requirement it has for that kind of descriptor holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.environment import missing_packages

Predicate = Callable[[SparseBlockDescriptor, DeviceFacts], bool]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line of the table: `engine` serves descriptors of `kind` only where `holds`. `need` says it in words."""

    engine: str
    kind: str
    need: str
    holds: Predicate


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an engine serves a descriptor on a device, and why not."""

    ok: bool
    reason: str


PAGED = "csr/paged"
SAGE = "padded/strided"
QSA, QSA_INDEXED = "bitmap/packed", "token_ids/packed"


def _cuda(d: SparseBlockDescriptor, device: DeviceFacts) -> bool:
    return device.kind == "cuda"


def _ampere(d: SparseBlockDescriptor, device: DeviceFacts) -> bool:
    return device.capability >= (8, 0)


def _hopper(d: SparseBlockDescriptor, device: DeviceFacts) -> bool:
    return device.capability == (9, 0)


def _no_mask(mask: str) -> Predicate:
    return lambda d, device: mask not in d.masks


def _whole_sub_pages(d: SparseBlockDescriptor, device: DeviceFacts) -> bool:
    return d.page_stride is None or d.page_stride % (d.sub_page * d.head_dim) == 0


def _q_in_int32(d: SparseBlockDescriptor, device: DeviceFacts) -> bool:
    return (d.max_seq_len_kv or 0) * d.num_qo_heads * d.head_dim < 2**31


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement("reference", PAGED, "nothing more", lambda d, device: True),
    Requirement("cudnn", PAGED, "a CUDA device", _cuda),
    Requirement("cudnn", PAGED, "compute capability 8.0 or later", _ampere),
    Requirement("cudnn", PAGED, "no causal mask: cuDNN's diagonal runs over packed (token, head) rows, not over the tokens a row lists", _no_mask("causal")),
    Requirement("cudnn", PAGED, "no valid bits: cuDNN's paged attention has no mask inside a page", _no_mask("valid_bits")),
    Requirement("cudnn", PAGED, "a page stride that is a multiple of gcd(page_size, kv_block_size) * head_dim: cuDNN sees the cache as one array of sub-pages",
                _whole_sub_pages),
    Requirement("portable", PAGED, "a CUDA device", _cuda),
    Requirement("portable", PAGED, "compute capability 8.0 or later", _ampere),
    Requirement("sm90", PAGED, "a CUDA device", _cuda),
    Requirement("sm90", PAGED, "compute capability 9.0: wgmma exists only there", _hopper),
    Requirement("reference", SAGE, "nothing more", lambda d, device: True),
    Requirement("cudnn", SAGE, "an INT8 attention with a scale per block: cuDNN has none, and one scale per tensor in FP8 (describe() quotes its refusal)",
                lambda d, device: False),
    Requirement("portable", SAGE, "a CUDA device", _cuda),
    Requirement("portable", SAGE, "compute capability 8.0 or later", _ampere),
    Requirement("sm90", SAGE, "a CUDA device", _cuda),
    Requirement("sm90", SAGE, "compute capability 9.0: wgmma exists only there", _hopper),
    Requirement("reference", QSA, "nothing more", lambda d, device: True),
    Requirement("reference", QSA_INDEXED, "nothing more", lambda d, device: True),
    Requirement("cudnn", QSA, "a CUDA device", _cuda),
    Requirement("cudnn", QSA, "compute capability 10.0, 10.3 or 10.7: cuDNN Frontend's QSA is made for those",
                lambda d, device: device.capability in ((10, 0), (10, 3), (10, 7))),
    Requirement("cudnn", QSA, "12 or 24 query heads", lambda d, device: d.num_qo_heads in (12, 24)),
    Requirement("cudnn", QSA, "at most 2^31 - 1 elements of q", _q_in_int32),
    Requirement("cudnn", QSA_INDEXED, "a CUDA device", _cuda),
    Requirement("cudnn", QSA_INDEXED, "compute capability 10.0 or 10.3: cuDNN Frontend's indexed QSA is made for those",
                lambda d, device: device.capability in ((10, 0), (10, 3))),
    Requirement("cudnn", QSA_INDEXED, "12 query heads", lambda d, device: d.num_qo_heads == 12),
    Requirement("cudnn", QSA_INDEXED, "at most 2^31 - 1 elements of q", _q_in_int32),
    *(Requirement("portable", kind, need, holds) for kind in (QSA, QSA_INDEXED)
      for need, holds in (("a CUDA device", _cuda), ("compute capability 8.0 or later", _ampere))),
    *(Requirement("sm90", kind, need, holds) for kind in (QSA, QSA_INDEXED)
      for need, holds in (("a CUDA device", _cuda), ("compute capability 9.0: wgmma exists only there", _hopper))),
)

ENGINES: tuple[str, ...] = tuple(dict.fromkeys(r.engine for r in REQUIREMENTS))


def verdict(engine: str, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> Verdict:
    """What the table says, then whether this installation has what the engine imports."""
    rules = [r for r in REQUIREMENTS if r.engine == engine and r.kind == descriptor.kind]
    if not rules:
        return Verdict(False, f"{engine} serves no {descriptor.kind} descriptor")
    for rule in rules:
        if not rule.holds(descriptor, device):
            where = device.name if device.kind == "cpu" else f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})"
            return Verdict(False, f"{engine} on {where} needs {rule.need}")
    missing = missing_packages(engine)
    if missing:
        return Verdict(False, f"{engine} needs {' and '.join(missing)}; install the extra cuda12 or cuda13: pip install 'cudnn-graphs[cuda13]'")
    return Verdict(True, "")
