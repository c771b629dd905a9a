"""Checks every operation makes on its arguments, in the one wording of `errors.problem`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import problem
from ..memory import meets_itself, share_memory

INT32_MAX = 2**31 - 1
SCALES = (1e-37, 1e37)        # what stays finite and normal in fp32, with log2(e) multiplied in


def integer(name: str, value: Any, *, least: int = 1, fix: str = "pass a positive int") -> int:
    """An int (never a bool) from `least` to the int32 maximum. TypeError, ValueError, OverflowError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(problem(name, f"{type(value).__name__} {value!r}", "an int", fix))
    if value > INT32_MAX:
        raise OverflowError(problem(name, value, f"at most {INT32_MAX}", "sizes are 32-bit; split the work"))
    if value < least:
        raise ValueError(problem(name, value, f"at least {least}", fix))
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(problem(name, f"{type(value).__name__} {value!r}", "a bool", "pass True or False"))
    return value


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """A str among `choices`. TypeError for another type, ValueError for another str."""
    if not isinstance(value, str):
        raise TypeError(problem(name, f"{type(value).__name__} {value!r}", "a str", f"pass one of {', '.join(map(repr, choices))}"))
    if value not in choices:
        raise ValueError(problem(name, repr(value), f"one of {', '.join(map(repr, choices))}", "pick one of them"))
    return value


def positive_scale(name: str, value: Any, default: float) -> float:
    """A finite number > 0, in fp32 as the kernels take it; None takes the default. TypeError for what is no number."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(problem(name, f"{type(value).__name__} {value!r}", "a number", f"pass a float, or None for {default:g}"))
    if not SCALES[0] <= value <= SCALES[1]:
        raise ValueError(problem(name, f"{value!s:.40}", f"a finite number > 0, from {SCALES[0]:g} to {SCALES[1]:g}", f"pass a float, or None for {default:g}"))
    return float(value)


def tensor(name: str, value: Any) -> torch.Tensor:
    """A dense tensor. TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(problem(name, type(value).__name__, "a torch.Tensor", "convert it with torch.as_tensor"))
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(problem(name, f"a {'nested' if value.is_nested else value.layout} tensor", "a dense one", "convert it with .to_dense(), or pad it"))
    return value


def in_memory(tensors: dict[str, torch.Tensor | None]) -> None:
    """ValueError where a tensor's storage was freed under it, as FSDP does with `untyped_storage().resize_(0)`: torch itself would crash."""
    for name, value in tensors.items():
        if value is not None and not value.data_ptr() and value.numel():
            raise ValueError(problem(name, "a tensor whose storage was freed", f"{value.numel()} elements in memory", "gather or load it again first"))


def metadata(name: str, value: Any, dtype: torch.dtype, shape: tuple[int | str, ...], device: torch.device,
             wrong_dtype: type[Exception] = TypeError) -> torch.Tensor:
    """A tensor of exactly `dtype` (else `wrong_dtype`) and of `shape`, where a str is a free size (ValueError)."""
    tensor(name, value)
    if value.dtype != dtype:
        raise wrong_dtype(problem(name, value.dtype, dtype, f"convert it with .to({dtype})"))
    if value.device != device:
        raise ValueError(problem(name, value.device, device, f"move it with .to('{device}')"))
    given = value.shape
    if len(given) != len(shape) or any(isinstance(want, int) and want != have for want, have in zip(shape, given)):
        raise ValueError(problem(name, f"shape {list(given)}", f"shape [{', '.join(map(str, shape))}]", "see the function's docstring for every shape"))
    return value


def contiguous(name: str, value: torch.Tensor) -> torch.Tensor:
    if not value.is_contiguous():
        raise ValueError(problem(name, f"strides {list(value.stride())}", "a contiguous tensor", "call .contiguous() on it once, outside the loop"))
    return value


def row_aligned(name: str, value: torch.Tensor) -> torch.Tensor:
    """Last dim contiguous, everything a multiple of 16 bytes: what a 16-byte load needs."""
    strides, shape = value.stride(), value.shape
    per_16_bytes = 16 // value.element_size()
    if strides[-1] != 1 and shape[-1] > 1:
        raise ValueError(problem(name, f"strides {list(strides)}", "a last dimension of stride 1", "lay head_dim out contiguously"))
    if value.data_ptr() % 16 or any(s % per_16_bytes for s, n in zip(strides[:-1], shape) if n > 1):
        raise ValueError(problem(name, f"strides {list(strides)} at address {value.data_ptr():#x}", "16-byte alignment",
                                 f"start at and step by multiples of {per_16_bytes} elements"))
    return value


def no_overlap(name: str, written: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """ValueError where `written` shares a byte with another tensor or with itself. Exact for strided views."""
    if meets_itself(written):
        raise ValueError(problem(name, f"an expanded or overlapping tensor, strides {list(written.stride())}", "one address per element",
                                 "allocate it with torch.empty"))
    for other_name, other in others.items():
        if other is not None and share_memory(written, other):
            raise ValueError(problem(name, f"memory shared with {other_name}", "memory of its own", "give another buffer"))
