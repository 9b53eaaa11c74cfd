"""silu(gate) * up."""

import triton
import triton.language as tl
from torch import Tensor


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(gate) * up of [gate | up] [T, 2 I], in float32, rounded once."""
    T, width = out.shape
    if T == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    _swiglu[(T, triton.cdiv(width, block))](
        gate_up, out, width, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=4
    )


@triton.jit
def _swiglu(gate_up, out, width, stride_in, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * stride_in + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * stride_out + column, value.to(out.dtype.element_ty), mask=mask)
