"""The plan's arrays from KV lengths by one kernel: `plan._plan_split`, worker by worker.

Every worker is a program. It walks the line of cost from the first worker to itself, one step a worker, and
so needs nothing from the others; the arrays it then writes are its own items and the rows that end in it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.plan import (
    BLOCK_TOKENS,
    ITEM_BLOCKS,
    MAX_KV_TOKENS,
    SparseMLAPlan,
    WorkSplit,
    plan_from_indptr,
)

MAX_ROWS = 4096
"""A program holds all rows' costs in registers; above this the plan is built by torch's operations."""


def build_plan(kv_lens: Tensor, num_parts: int, *, kv_indices: Tensor | None = None) -> SparseMLAPlan:
    """`plan.build_plan` of lengths [rows] int32 or int64 on the device; equal in every array.

    A negative length counts as 0. Errors: PlanError for num_parts < 1.
    """
    if not 0 < kv_lens.shape[0] <= MAX_ROWS:
        indptr = torch.nn.functional.pad(kv_lens.clamp_min(0).cumsum(0), (1, 0)).to(torch.int32)
        return plan_from_indptr(indptr, num_parts, kv_indices=kv_indices, kv_bound=_bound(kv_indices))
    kv_indptr = torch.empty(kv_lens.shape[0] + 1, dtype=torch.int32, device=kv_lens.device)
    return _build(kv_lens, kv_indptr, num_parts, kv_indices, from_lens=True)


def build_plan_from_indptr(
    kv_indptr: Tensor, num_parts: int, *, kv_indices: Tensor | None = None
) -> SparseMLAPlan:
    """The same from cumulative lengths [rows + 1] int32, which become the plan's own kv_indptr."""
    if not 1 < kv_indptr.shape[0] <= MAX_ROWS + 1:
        return plan_from_indptr(kv_indptr, num_parts, kv_indices=kv_indices, kv_bound=_bound(kv_indices))
    kv_indptr = kv_indptr.to(torch.int32)
    return _build(kv_indptr, kv_indptr, num_parts, kv_indices, from_lens=False)


def _build(
    source: Tensor, kv_indptr: Tensor, num_parts: int, kv_indices: Tensor | None, *, from_lens: bool
) -> SparseMLAPlan:
    if num_parts < 1:
        raise PlanError(f"num_parts {num_parts}: a plan needs at least one worker; use 1 or more")
    rows = kv_indptr.shape[0] - 1
    max_items = rows + num_parts - 1
    max_entries = min(max_items, 2 * (num_parts - 1))

    def array(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=source.device)

    split = WorkSplit(
        num_parts=num_parts,
        work_indptr=array(num_parts + 1),
        work_info=array(max_items, 8),
        reduce_indptr=array(rows + 1),
        reduce_final_map=array(rows, 2),
        reduce_partial_map=array(max_entries),
        num_partial_rows=max_entries,
    )
    block_rows = max(32, triton.next_power_of_2(rows))
    _plan_worker[(num_parts,)](
        source,
        kv_indptr,
        split.work_indptr,
        split.work_info,
        split.reduce_indptr,
        split.reduce_final_map,
        split.reduce_partial_map,
        rows,
        num_parts,
        max_items,
        max_entries,
        FROM_LENS=from_lens,
        BLOCK_TOKENS=BLOCK_TOKENS,
        ITEM_BLOCKS=ITEM_BLOCKS,
        BLOCK_ROWS=block_rows,
        BLOCK_FILL=max(32, triton.next_power_of_2(2 * num_parts)),
        # A step is one maximum over all rows: within a warp it needs no shared memory.
        num_warps=1 if block_rows <= 1024 else 4,
    )
    return SparseMLAPlan(
        rows=rows, kv_bound=_bound(kv_indices), kv_indptr=kv_indptr, kv_indices=kv_indices, split=split
    )


def _bound(kv_indices: Tensor | None) -> int:
    """Tokens that the rows may have: as many as have room."""
    return MAX_KV_TOKENS if kv_indices is None else kv_indices.shape[0]


@triton.jit
def _plan_worker(
    source,
    kv_indptr,
    work_indptr,
    work_info,
    reduce_indptr,
    reduce_final_map,
    reduce_partial_map,
    rows,
    num_parts,
    max_items,
    max_entries,
    FROM_LENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ITEM_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_FILL: tl.constexpr,
):
    worker = tl.program_id(0)
    row = tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    if FROM_LENS:
        length = tl.maximum(tl.load(source + row, mask=is_row, other=0).to(tl.int32), 0)
        kv_end = tl.cumsum(length, 0)
        kv_start = kv_end - length
        if worker == 0:
            tl.store(kv_indptr, 0)
            tl.store(kv_indptr + 1 + row, kv_end, mask=is_row)
    else:
        kv_start = tl.load(source + row, mask=is_row, other=0)
        kv_end = tl.load(source + 1 + row, mask=is_row, other=0)
    cost = (kv_end - kv_start + BLOCK_TOKENS - 1) // BLOCK_TOKENS + ITEM_BLOCKS
    cost_end = tl.cumsum(tl.where(is_row, cost, 0), 0)
    cost_start = cost_end - tl.where(is_row, cost, 0)
    total = tl.max(cost_end, 0)
    payload = (total + num_parts - 1) // num_parts + ITEM_BLOCKS

    # [start, end) is a worker's stretch. Where a stretch begins inside a row, the row is split there:
    # `cuts` such places so far, in `split_rows` rows, the last of which starts at `split_start`.
    start, cuts, split_rows, split_start = 0, 0, 0, -1
    end, is_cut, whole = _stretch_end(start, payload, cost_end, total, ITEM_BLOCKS)
    for _ in range(worker):
        start = end
        cuts += is_cut.to(tl.int32)
        split_rows += (is_cut & (whole != split_start)).to(tl.int32)
        split_start = tl.where(is_cut, whole, split_start)
        end, is_cut, whole = _stretch_end(start, payload, cost_end, total, ITEM_BLOCKS)
    end = tl.where(worker == num_parts - 1, total, end)

    # Every row before this stretch has one item, and one more for each cut.
    first_item = tl.sum((is_row & (cost_end <= start)).to(tl.int32), 0) + cuts
    tl.store(work_indptr + worker, first_item)

    in_stretch = is_row & (cost_start < end) & (cost_end > start)
    continues, goes_on = cost_start < start, cost_end > end
    item_start = tl.where(continues, kv_start + (start - cost_start) * BLOCK_TOKENS, kv_start)
    item_end = tl.where(goes_on, kv_start + (end - cost_start) * BLOCK_TOKENS, kv_end)
    next_part = cuts + split_rows
    partial = tl.where(continues, next_part - 1, tl.where(goes_on, next_part, -1))
    info = work_info + (row + cuts) * 8
    tl.store(info, row, mask=in_stretch)
    tl.store(info + 1, partial, mask=in_stretch)
    tl.store(info + 2, row, mask=in_stretch)
    tl.store(info + 3, row + 1, mask=in_stretch)
    tl.store(info + 4, item_start, mask=in_stretch)
    tl.store(info + 5, item_end, mask=in_stretch)
    tl.store(info + 6, kv_end - item_end, mask=in_stretch)
    tl.store(info + 7, tl.zeros_like(row), mask=in_stretch)

    ends_here = in_stretch & (goes_on == 0)
    tl.store(reduce_indptr + 1 + row, tl.zeros_like(row) + next_part, mask=ends_here)
    tl.store(reduce_final_map + 2 * row, tl.where(continues, row, -1), mask=ends_here)
    tl.store(reduce_final_map + 2 * row + 1, tl.where(continues, row + 1, -1), mask=ends_here)

    fill = tl.arange(0, BLOCK_FILL)
    if worker == 0:
        tl.store(reduce_indptr, 0)
        tl.store(reduce_partial_map + fill, fill, mask=fill < max_entries)
    if worker == num_parts - 1:
        num_items = rows + cuts
        tl.store(work_indptr + num_parts, num_items)
        unused = num_items + fill
        for field in range(8):
            tl.store(work_info + unused * 8 + field, tl.zeros_like(fill), mask=unused < max_items)


@triton.jit
def _stretch_end(start, payload, cost_end, total, ITEM_BLOCKS: tl.constexpr):
    """(end of the stretch from `start`, does it end inside a row, end of the last whole row in reach)."""
    reach = start + payload
    whole = tl.max(tl.where(cost_end <= reach, cost_end, 0), 0)
    cut = reach - ITEM_BLOCKS
    is_cut = (cut > whole) & (cut < total)
    return tl.minimum(tl.maximum(cut, whole), total), is_cut, whole
