"""Making the inputs of Sage attention: the quantizer and the two token orders of V."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..engines.sage_quantizer import DTYPES, quantize_on_gpu
from ..errors import problem
from ..planning import default_store
from ..reference.sage_layout import V_LAYOUTS, interleaved_order, natural_order
from ..reference.sage_quantize import quantize_on_cpu
from ..runtime.devices import device_facts
from . import checks
from .sage_signature import check_v_layout

HEAD_DIM = 128


class SageTensors(NamedTuple):
    """What `quantize_sage_qkv` makes. The first six are the first arguments of `sage_block_sparse_attention`; pass it v_layout too."""

    q_int8: torch.Tensor                # [B, H, Sq, 128]
    k_int8: torch.Tensor                # [B, H, Sk, 128], less k_mean
    v_fp8: torch.Tensor                 # [B, H, 128, ceil(Sk / 64) * 64] float8_e4m3fn, tokens in v_layout order, padding 0
    q_scale: torch.Tensor               # [B, H, ceil(Sq / 128) * 4] fp32, per 32 tokens
    k_scale: torch.Tensor               # [B, H, ceil(Sk / 64)] fp32, per 64 tokens
    v_scale: torch.Tensor               # [B, H, 128] fp32, per channel
    k_mean: torch.Tensor                # [B, H, 128] fp32, zeros without smooth_k
    v_layout: str


def quantize_sage_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, v_layout: str = "natural", smooth_k: bool = True) -> SageTensors:
    """Quantize Q and K to int8 and V to e4m3 for `sage_block_sparse_attention`.

    q [B, H, Sq, 128], k and v [B, H, Sk, 128]: bf16, fp16 or fp32, one dtype, any strides, so a view of a fused QKV buffer is read
    in place. scale = max(largest magnitude, 1e-7) / 127 (Q per 32 tokens, K per 64) or / 448 (V per channel); values are
    divided by it and rounded half to even. smooth_k subtracts from K its mean over tokens first: the attention output is
    the same without correction, the lse of the original K is lse + softmax_scale * (q . k_mean).
    v_layout: "natural" or "interleaved16", the token order of v_fp8. The CPU and the GPU agree bit for bit; on a GPU
    it is one kernel on the current stream and may be captured in a CUDA graph after one call outside.

    Raises TypeError (not a tensor, other dtypes, smooth_k not a bool), ValueError (shape, device, empty, unknown v_layout).
    """
    check_v_layout(v_layout)
    checks.flag("smooth_k", smooth_k)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x, q, k)
    facts = device_facts(q.device)
    parts: tuple[Any, ...] = quantize_on_cpu(q, k, v, v_layout, smooth_k) if facts.kind == "cpu" else quantize_on_gpu(
        q.detach(), k.detach(), v.detach(), v_layout, smooth_k, facts, default_store().cubins)
    return SageTensors._make((*parts, v_layout))


def _check(name: str, x: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    checks.tensor(name, x)
    if x.dtype not in DTYPES or x.dtype != q.dtype:
        raise TypeError(problem(name, x.dtype, "bfloat16, float16 or float32, the same for q, k and v", "convert them with .to()"))
    if x.dim() != 4 or x.shape[3] != HEAD_DIM or 0 in x.shape:
        raise ValueError(problem(name, f"shape {list(x.shape)}", f"[B, H, S, {HEAD_DIM}], nothing empty", "transpose to heads before tokens; pad D to 128"))
    if x.shape[:2] != q.shape[:2] or (name == "v" and x.shape != k.shape):
        raise ValueError(problem(name, f"shape {list(x.shape)}", f"{list(q.shape[:2])} batches and heads, and v like k",
                                 "Sage attention has one KV head per query head"))
    if x.device != q.device:
        raise ValueError(problem(name, x.device, q.device, f"move it with .to('{q.device}')"))


def convert_sage_v_layout(v_fp8: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """v_fp8 [..., 16 n] float8_e4m3fn with its tokens moved from one v_layout to the other; a copy, also when they are the same.

    "interleaved16" is what FlashInfer's and SageAttention's quantizers emit: slot s of each aligned group of 16 tokens holds
    token (0,1,8,9,2,3,10,11,4,5,12,13,6,7,14,15)[s]. Raises TypeError (not such a tensor), ValueError (unknown layout, last dim).
    """
    for name, layout in (("source", source), ("target", target)):
        checks.one_of(name, layout, V_LAYOUTS)
    checks.tensor("v_fp8", v_fp8)
    if v_fp8.dtype != torch.float8_e4m3fn:
        raise TypeError(problem("v_fp8", v_fp8.dtype, "torch.float8_e4m3fn", "quantize it with quantize_sage_qkv"))
    if v_fp8.dim() == 0 or v_fp8.shape[-1] % 16:
        raise ValueError(problem("v_fp8", f"shape {list(v_fp8.shape)}", "a last dimension of whole groups of 16 tokens", "pad tokens to a multiple of 64"))
    raw = v_fp8.detach().view(torch.uint8)
    if source != target:
        raw = (natural_order if target == "natural" else interleaved_order)(raw)
    return (raw.clone() if source == target else raw).view(torch.float8_e4m3fn)
