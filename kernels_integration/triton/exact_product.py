"""x W^T of bfloat16 rows and a float32 matrix, as exact as in float32: for the few scores that decide.

Tensor cores multiply bfloat16 exactly and sum in float32. A float32 number is the sum of three bfloat16
numbers, so three products on them are one in float32. The inputs are cut into fixed parts, each of which is a
program's: few outputs would leave a GPU idle, and a row's sums do not depend on the other rows.
T rows, I inputs, O outputs, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_I = 128
_MOST_PARTS = 16


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """[T, O] float32: the sum of `exact_parts`, in their order."""
    parts = exact_parts(x, weight)
    out = torch.empty_like(parts[0])
    if out.numel():
        _add_parts[(triton.cdiv(out.numel(), 1024),)](
            parts, out, out.numel(), PARTS=parts.shape[0], BLOCK=1024, num_warps=4
        )
    return out


def exact_parts(x: Tensor, weight: Tensor) -> Tensor:
    """[P, T, O] float32, which sum up to x [T, I] bfloat16 . weight [O, I] float32; last dims contiguous."""
    T, width = x.shape
    outputs = weight.shape[0]
    blocks_of_part = triton.cdiv(triton.cdiv(width, _BLOCK_I), _MOST_PARTS)
    num_parts = triton.cdiv(width, blocks_of_part * _BLOCK_I)
    parts = torch.empty(num_parts, T, outputs, dtype=torch.float32, device=x.device)
    if T:
        _exact_part[(triton.cdiv(T, 16), triton.cdiv(outputs, 64), num_parts)](
            x,
            weight,
            parts,
            T,
            outputs,
            width,
            x.stride(0),
            weight.stride(0),
            BLOCKS=blocks_of_part,
            BLOCK_I=_BLOCK_I,
            num_warps=4,
        )
    return parts


@triton.jit
def _exact_part(
    x,
    weight,
    parts,
    num_rows,
    num_outputs,
    width,
    stride_x,
    stride_weight,
    BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = tl.program_id(1) * 64 + tl.arange(0, 64)
    is_row, is_column = row < num_rows, column < num_outputs
    x_at = x + row.to(tl.int64)[:, None] * stride_x
    weight_at = weight + column.to(tl.int64)[:, None] * stride_weight
    acc = tl.zeros([16, 64], tl.float32)
    for block in tl.static_range(BLOCKS):
        k = (tl.program_id(2) * BLOCKS + block) * BLOCK_I + tl.arange(0, BLOCK_I)
        in_k = (k < width)[None, :]
        rows = tl.load(x_at + k[None, :], mask=is_row[:, None] & in_k, other=0.0)
        tile = tl.load(weight_at + k[None, :], mask=is_column[:, None] & in_k, other=0.0)
        high = tile.to(tl.bfloat16)
        rest = tile - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # The small ones first: they would be lost beside the large one's sum.
        acc = tl.dot(rows, tl.trans(low), acc)
        acc = tl.dot(rows, tl.trans(middle), acc)
        acc = tl.dot(rows, tl.trans(high), acc)
    out = (tl.program_id(2).to(tl.int64) * num_rows + row[:, None]) * num_outputs + column[None, :]
    tl.store(parts + out, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_parts(parts, out, num_values, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * num_values.to(tl.int64) + at, mask=at < num_values, other=0.0)
    tl.store(out + at, total, mask=at < num_values)
