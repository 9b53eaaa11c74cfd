"""RMSNorm, alone or after a residual sum, and rotary embedding, each one pass over its rows.

T rows, W width, R rotary dims.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = weight * (x * rsqrt(mean(x^2) + eps)) over the last dim of x [T, W], in float32, rounded once.

    x and out: any floating dtype, last dim contiguous, out may be x; weight [W].
    """
    _norm(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x in place, rounded to its dtype; out = RMSNorm of that. Shapes as for `rms_norm`."""
    _norm(x, residual, weight, eps, out)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    T, W = x.shape
    if T == 0:
        return
    block = triton.next_power_of_2(W)
    _norm_rows[(T,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        W,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    out,
    eps,
    width,
    stride_x,
    stride_residual,
    stride_out,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual + row * stride_residual + column
        value += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual_at, stored, mask=mask)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) * (value * scale)
    tl.store(out + row * stride_out + column, value.to(out.dtype.element_ty), mask=mask)


def rotate_pairs(x: Tensor, table: Tensor, out: Tensor) -> None:
    """RoPE over neighbouring pairs (2j, 2j+1) of x [T, H, R], written to out [T, H, R], which may be x.

    table [T, R/2] complex64, or as real [T, R/2, 2] float32. Last dims contiguous. Computed in float32.
    """
    T, H, R = x.shape
    if T == 0:
        return
    table = torch.view_as_real(table) if table.is_complex() else table
    block_h = max(1, min(triton.next_power_of_2(H), 2048 // R))
    _rotate[(T, triton.cdiv(H, block_h))](
        x,
        table,
        out,
        H,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        table.stride(0),
        PAIRS=R // 2,
        BLOCK_P=triton.next_power_of_2(R // 2),
        BLOCK_H=block_h,
        num_warps=2,
    )


@triton.jit
def _rotate(
    x,
    table,
    out,
    num_heads,
    stride_x_row,
    stride_x_head,
    stride_out_row,
    stride_out_head,
    stride_table,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = (head < num_heads) & (pair < PAIRS)
    angle = table + row * stride_table + 2 * pair
    cos = tl.load(angle, mask=pair < PAIRS, other=0.0)
    sin = tl.load(angle + 1, mask=pair < PAIRS, other=0.0)
    x_at = x + row * stride_x_row + head * stride_x_head + 2 * pair
    even = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_at + 1, mask=mask, other=0.0).to(tl.float32)
    out_at = out + row * stride_out_row + head * stride_out_head + 2 * pair
    dtype = out.dtype.element_ty
    tl.store(out_at, (even * cos - odd * sin).to(dtype), mask=mask)
    tl.store(out_at + 1, (even * sin + odd * cos).to(dtype), mask=mask)
