"""Matrix products whose bits for a row do not depend on the other rows: what `--deterministic` computes by.

out^T = W x^T, so that the weight's outputs are the long side of a tile on the tensor cores and the rows its
short side. However many rows a tile has, an output is the sum over the same segments of the input, each
summed from its start on in steps of the tensor core, the segments added in their order. How the input is cut
follows from the weight's shape alone. Few rows have a program for each segment, of which the last to arrive
adds up; of many rows one program sums all segments.

T rows, I inputs, O outputs, H heads, S segments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.triton.tiles import dot_precision

_OUTPUTS = 64
"""Of a tile; the least that warps of four multiply together."""
_BLOCK_I = 128
_PROGRAMS = 132
"""Segments are cut for as many programs at most."""
_FEWEST_BLOCKS = 2
_FEWEST_SEGMENTS = 3
"""Fewer, or shorter ones, cost more in adding up than they bring."""
FEW_ROWS = 16
"""Up to these it is at least as fast as torch's library on all shapes of a model of 16 B parameters."""
_MOST_SHARED_ROWS = 128
"""Rows up to which segments are programs of their own."""


class FixedProduct:
    """x [T, I] -> x W^T [T, O], in W's dtype (bfloat16, float16 or float32), sums in float32."""

    def __init__(self, weight: Tensor) -> None:
        """weight [O, I]."""
        self._weight = weight.contiguous()
        outputs, width = weight.shape
        self._segment = _segment_for(outputs, width)
        tiles = triton.cdiv(outputs, _OUTPUTS) * triton.cdiv(_MOST_SHARED_ROWS, 16)
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
        """How many segments of a tile are summed; 0 between products."""

    def __call__(self, x: Tensor) -> Tensor:
        """x of W's dtype, last dim contiguous."""
        out = torch.empty(x.shape[0], self._weight.shape[0], dtype=self._weight.dtype, device=x.device)
        _run(x.unsqueeze(1), self._weight.unsqueeze(0), out.unsqueeze(1), self._segment, self._arrived)
        return out


def head_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, H, O] = x [T, H, I] weight [H, I, O], head by head; last dims contiguous, one dtype."""
    _run(x, weight.transpose(1, 2), out, triton.cdiv(weight.shape[1], _BLOCK_I) * _BLOCK_I, None)


def _segment_for(outputs: int, width: int) -> int:
    """Inputs of a segment: whole blocks."""
    blocks, tiles = -(-width // _BLOCK_I), -(-outputs // _OUTPUTS)
    segments = max(1, min(_PROGRAMS // tiles, blocks // _FEWEST_BLOCKS))
    if segments < _FEWEST_SEGMENTS:
        segments = 1
    return -(-blocks // segments) * _BLOCK_I


def _run(x: Tensor, weight: Tensor, out: Tensor, segment: int, arrived: Tensor | None) -> None:
    """x [T, H, I], weight [H, O, I] and out [T, H, O] of any strides; x's and out's last dims contiguous.

    arrived None: all segments by one program.
    """
    T, H, width = x.shape
    if T == 0:
        return
    outputs = weight.shape[1]
    segments = triton.cdiv(width, segment)
    is_shared = arrived is not None and segments > 1 and T <= _MOST_SHARED_ROWS
    tile = _tile_for(T, outputs, x.dtype)
    row_tiles, output_tiles = triton.cdiv(T, tile["BLOCK_T"]), triton.cdiv(outputs, tile["BLOCK_O"])
    shared_rows = T if is_shared else 0
    parts = torch.empty(segments, shared_rows, outputs, dtype=torch.float32, device=x.device)
    # Neighbouring programs are of one tile of outputs: they share the weight in the L2 cache.
    _product[(row_tiles, output_tiles * (segments if is_shared else 1), H)](
        x,
        weight,
        out,
        parts,
        parts if arrived is None else arrived,
        T,
        outputs,
        width,
        segment,
        segments,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        out.stride(0),
        out.stride(1),
        IS_SHARED=is_shared,
        PRECISION=dot_precision(x.dtype),
        **tile,
    )


def _tile_for(num_rows: int, num_outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """As measured fastest on an H200; the result does not depend on it, but in float32, where it is one."""
    is_narrow = num_outputs <= 4096
    if dtype == torch.float32:
        chosen = (16, _OUTPUTS, 32, 4, 2)
    elif num_rows <= 16:
        chosen = (16, _OUTPUTS, 128, 4, 5)
    elif num_rows <= 32 or (num_rows <= 128 and is_narrow):
        chosen = (32, _OUTPUTS, 128, 4, 4)
    elif num_rows <= 64:
        chosen = (64, _OUTPUTS, 128, 4, 4) if num_outputs <= 16384 else (64, 128, 64, 8, 4)
    elif num_rows <= 512:
        chosen = (64, 128, 128, 8, 3) if is_narrow else (128, 128, 64, 8, 4)
    else:
        chosen = (128, 128, 64, 8, 3) if is_narrow else (256, 128, 64, 8, 3)
    names = ("BLOCK_T", "BLOCK_O", "BLOCK_I", "num_warps", "num_stages")
    return dict(zip(names, chosen, strict=True))


@triton.jit
def _product(
    x,
    weight,
    out,
    parts,
    arrived,
    num_rows,
    num_outputs,
    width,
    segment,
    num_segments,
    stride_x_row,
    stride_x_head,
    stride_weight_head,
    stride_weight_output,
    stride_weight_input,
    stride_out_row,
    stride_out_head,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    IS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    output_tile = tl.program_id(1)
    first_segment, end_segment = 0, num_segments
    if IS_SHARED:
        output_tile = tl.program_id(1) // num_segments
        first_segment = tl.program_id(1) % num_segments
        end_segment = first_segment + 1
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = output_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_I)
    is_row, is_output = row < num_rows, output < num_outputs
    x_at = x + head * stride_x_head + row.to(tl.int64)[:, None] * stride_x_row + k[None, :]
    weight_at = weight + head * stride_weight_head + output.to(tl.int64)[:, None] * stride_weight_output
    total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for own in range(first_segment, end_segment):
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        end = tl.minimum((own + 1) * segment, width)
        for start in range(own * segment, end, BLOCK_I):
            in_k = (start + k < width)[None, :]  # segments are whole blocks
            rows = tl.load(x_at + start, mask=is_row[:, None] & in_k, other=0.0)
            tile = tl.load(
                weight_at + (start + k)[None, :] * stride_weight_input,
                mask=is_output[:, None] & in_k,
                other=0.0,
            )
            acc = tl.dot(tile, tl.trans(rows), acc, input_precision=PRECISION)
        total += acc
    mask = is_output[:, None] & is_row[None, :]
    if IS_SHARED:
        at = parts + row[None, :] * num_outputs + output[:, None]
        stride_segment = num_rows * num_outputs
        tl.store(at + first_segment * stride_segment, total, mask=mask)
        tl.debug_barrier()  # all of it is stored before it counts as arrived
        counter = arrived + output_tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_segments - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
            for own in range(num_segments):
                # Past the first level of cache, which may hold what lay there before.
                total += tl.load(at + own * stride_segment, mask=mask, other=0.0, cache_modifier=".cg")
            out_at = out + row[None, :] * stride_out_row + output[:, None]
            tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
            tl.store(counter, 0)
    else:
        out_at = out + head * stride_out_head + row.to(tl.int64)[None, :] * stride_out_row + output[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
