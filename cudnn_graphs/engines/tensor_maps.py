"""Tensor maps: the 128 bytes by which Hopper's copy engine finds boxes of a tensor. They travel as launch parameters."""

from __future__ import annotations

import ctypes


def encode_tensor_map(element: str, pointer: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, swizzle: int,
                      l2_promotion: int) -> bytes:
    """element: as in CUtensorMapDataType. dims, box: elements, the fastest first. strides: bytes, of every dimension but the first. swizzle and
    l2_promotion: bytes. What lies outside the tensor is copied as zeros. RuntimeError where the driver refuses."""
    from cuda.bindings import driver as cuda
    status, tensor_map = cuda.cuTensorMapEncodeTiled(
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}"), len(dims), pointer,
        [cuda.cuuint64_t(n) for n in dims], [cuda.cuuint64_t(n) for n in strides], [cuda.cuuint32_t(n) for n in box], [cuda.cuuint32_t(1)] * len(dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}B"),
        getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{l2_promotion}B"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"tensor map: got {element} {dims}, strides {strides} bytes, at {pointer:#x}; need one that the driver encodes, "
                           f"16-byte aligned; {status}")
    return ctypes.string_at(tensor_map.getPtr(), 128)
