"""What kernels are told in their own terms: element types by the names of kernels/common/numeric.cuh, scales in powers of two."""

from __future__ import annotations

import math

import torch

LOG2_E = math.log2(math.e)
_ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}


def element_name(dtype: torch.dtype | str) -> str:
    """Of a torch dtype, or of its name in a descriptor."""
    return _ELEMENTS[str(dtype).removeprefix("torch.")]
