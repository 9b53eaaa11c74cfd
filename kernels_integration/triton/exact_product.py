"""x W^T of bfloat16 rows and a float32 matrix, as exact as in float32: for the few scores that decide.

Tensor cores multiply bfloat16 exactly and sum in float32. A float32 number is the sum of three bfloat16
numbers, so three products on them are one in float32.
T rows, I inputs, O outputs.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_I = 256


def exact_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, O] float32 = x [T, I] bfloat16 . weight [O, I] float32; last dims contiguous."""
    T, width = x.shape
    outputs = weight.shape[0]
    if T == 0:
        return
    _exact_product[(triton.cdiv(T, 16), triton.cdiv(outputs, 16))](
        x,
        weight,
        out,
        T,
        outputs,
        width,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        BLOCK_I=_BLOCK_I,
        num_warps=4,
        num_stages=4,
    )


@triton.jit
def _exact_product(
    x, weight, out, num_rows, num_outputs, width, stride_x, stride_weight, stride_out, BLOCK_I: tl.constexpr
):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = tl.program_id(1) * 16 + tl.arange(0, 16)
    k = tl.arange(0, BLOCK_I)
    x_at = x + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * stride_weight + k[None, :]
    acc = tl.zeros([16, 16], tl.float32)
    for start in range(0, width, BLOCK_I):
        in_k = (start + k < width)[None, :]
        rows = tl.load(x_at + start, mask=(row < num_rows)[:, None] & in_k, other=0.0)
        tile = tl.load(weight_at + start, mask=(column < num_outputs)[:, None] & in_k, other=0.0)
        high = tile.to(tl.bfloat16)
        rest = tile - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # The small ones first: they are lost beside the large one's sum, not among themselves.
        acc = tl.dot(rows, tl.trans(low), acc)
        acc = tl.dot(rows, tl.trans(middle), acc)
        acc = tl.dot(rows, tl.trans(high), acc)
    out_at = out + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(out_at, acc, mask=(row < num_rows)[:, None] & (column < num_outputs)[None, :])
