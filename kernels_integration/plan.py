"""The sparse MLA plan: which rows of q attend to which KV slots, cut into work items for workers.

Arrays, splitting rule and invariants are those of aiter's persistent MLA kernels (serial v1.2
planner of ROCm/aiter, page size 1, one query token per row).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels_integration.errors import PlanError

BLOCK_TOKENS = 16
"""KV tokens of one unit of work."""
ITEM_BLOCKS = 16
"""The fixed cost of a work item, in blocks."""
MAX_KV_TOKENS = 2**31 - 1
"""Of all rows of a plan together: its pointers are int32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkSplit:
    """How a plan's rows are cut into items for `num_parts` workers, and how split rows are merged.

    A split made on a device has arrays of their largest possible size, so that their shapes do not
    depend on the lengths: `work_indptr` and `reduce_indptr` tell what is used. On the CPU the arrays
    are cut to what is used and otherwise equal.
    """

    num_parts: int
    work_indptr: Tensor
    """[num_parts + 1] int32: worker c runs the items work_indptr[c]..work_indptr[c + 1] - 1 in order."""
    work_info: Tensor
    """[n, 8] int32: batch_idx, partial_qo_loc, qo_start, qo_end, kv_start, kv_end, kv_offset, 0.

    kv_start and kv_end count in kv_indices; kv_offset = tokens of the row after kv_end;
    partial_qo_loc = -1: the item is the whole row and writes the final output.
    """
    reduce_indptr: Tensor
    """[rows + 1] int32: entries of row t in reduce_partial_map; none: the row is not split."""
    reduce_final_map: Tensor
    """[rows, 2] int32: qo_start, qo_end of a split row; -1, -1 of an unsplit one."""
    reduce_partial_map: Tensor
    """[entries] int32: the partial row that each part of a split row writes."""
    num_partial_rows: int
    """Partial rows that a backend must provide."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseMLAPlan:
    """Row t attends to the slots kv_indices[kv_indptr[t]:kv_indptr[t + 1]]."""

    rows: int
    kv_bound: int
    """KV tokens of all rows: exactly on the host, at most on a device."""
    kv_indptr: Tensor
    """[rows + 1] int32, cumulative KV tokens."""
    kv_indices: Tensor | None
    """[>= kv_bound] int32 or int64 slots; None: only the split is planned."""
    split: WorkSplit | None
    """None: for a backend that asks for none."""

    def with_indices(self, kv_indices: Tensor) -> "SparseMLAPlan":
        """The same rows and split over other slots. Every row must have as many of them as it had here.

        Errors: PlanError unless there are as many slots as this plan has, or on a device may have.
        """
        _check_length(kv_indices, self.kv_bound, is_exact=kv_indices.device.type == "cpu")
        return replace(self, kv_indices=kv_indices)


def build_plan(
    kv_lens: Sequence[int] | Tensor, num_parts: int | None, *, kv_indices: Tensor | None = None
) -> SparseMLAPlan:
    """Plans rows of the given KV lengths [rows] for num_parts workers; None: without a split.

    Errors: PlanError for num_parts < 1 and lengths that are no integers; on the host for a negative length
    and for more than MAX_KV_TOKENS together.
    """
    lens = kv_lens if isinstance(kv_lens, Tensor) else _host_lengths(kv_lens)
    if lens.dtype.is_floating_point or lens.dtype.is_complex or lens.dtype is torch.bool:
        raise PlanError(
            f"KV lengths of {lens.dtype}: lengths are whole numbers of tokens; use int32 or int64"
        )
    if lens.device.type == "cpu" and lens.numel():
        least, most = (int(bound) for bound in lens.aminmax())
        if least < 0 or most > MAX_KV_TOKENS:
            bad = (lens < 0) | (lens > MAX_KV_TOKENS)
            row = int(bad.int().argmax())
            raise PlanError(
                f"KV length {kv_lens[row]} of row {row}: lengths are 0 to {MAX_KV_TOKENS}; "
                "a row without KV has 0"
            )
    kv_indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int64, device=lens.device)
    kv_indptr[1:] = lens.cumsum(0)
    return plan_from_indptr(kv_indptr, num_parts, kv_indices=kv_indices)


def plan_from_indptr(
    kv_indptr: Tensor,
    num_parts: int | None,
    *,
    kv_indices: Tensor | None = None,
    kv_bound: int | None = None,
) -> SparseMLAPlan:
    """`build_plan` from cumulative lengths kv_indptr [rows + 1]; on a device it never waits for the host.

    kv_bound: on a device, tokens that all rows have at most; None: as many as there are kv_indices.
    """
    if num_parts is not None and num_parts < 1:
        raise PlanError(f"num_parts {num_parts}: a plan needs at least one worker; use 1 or more")
    on_host = kv_indptr.device.type == "cpu"
    if on_host:
        kv_bound = int(kv_indptr[-1])
    elif kv_bound is None:
        if kv_indices is None:
            raise PlanError("a plan made on a device needs kv_indices, or kv_bound: it does not read lengths")
        kv_bound = kv_indices.shape[0]
    if kv_bound > MAX_KV_TOKENS:
        raise PlanError(
            f"{kv_bound} KV tokens in {kv_indptr.shape[0] - 1} rows: a plan holds {MAX_KV_TOKENS} at most, "
            "its pointers are int32; plan fewer rows at a time"
        )
    if kv_indices is not None:
        _check_length(kv_indices, kv_bound, is_exact=False)
    kv_indptr = kv_indptr.to(torch.int32)
    split = None
    if num_parts is not None:
        split = _one_item_per_row(kv_indptr, num_parts)
        if num_parts > 1 and kv_indptr.shape[0] > 1:
            split = split_rows(kv_indptr, num_parts)
            split = _cut_to_used(split) if on_host else split
    return SparseMLAPlan(
        rows=kv_indptr.shape[0] - 1,
        kv_bound=kv_bound,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        split=split,
    )


def _host_lengths(kv_lens: Sequence[int]) -> Tensor:
    for row, length in enumerate(kv_lens):
        if isinstance(length, bool) or not hasattr(length, "__index__"):
            raise PlanError(f"KV length {length!r} of row {row}: lengths are whole numbers of tokens")
    # Beyond any plan, but within int64: refused with its row like any other length.
    limit = MAX_KV_TOKENS + 1
    return torch.tensor([min(max(int(length), -limit), limit) for length in kv_lens], dtype=torch.int64)


def _check_length(kv_indices: Tensor, kv_bound: int, *, is_exact: bool) -> None:
    length = kv_indices.shape[0]
    if length < kv_bound or (is_exact and length != kv_bound):
        raise PlanError(
            f"kv_indices of {length} entries for a plan of {kv_bound} KV tokens: a plan serves the lengths "
            "that it was built for; give it one slot a token, or build a plan for the other lengths"
        )


def _one_item_per_row(kv_indptr: Tensor, num_parts: int) -> WorkSplit:
    """The first worker runs every row whole."""
    rows, device = kv_indptr.shape[0] - 1, kv_indptr.device
    row_bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
    row = row_bounds[:-1]
    reduce_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    zero = reduce_indptr[:-1]
    reduce_final_map = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
    work_info = torch.stack(
        (row, reduce_final_map[:, 0], row, row_bounds[1:], kv_indptr[:-1], kv_indptr[1:], zero, zero), 1
    )
    work_indptr = torch.full((num_parts + 1,), rows, dtype=torch.int32, device=device)
    work_indptr[0] = 0
    return WorkSplit(
        num_parts=num_parts,
        work_indptr=work_indptr,
        work_info=work_info,
        reduce_indptr=reduce_indptr,
        reduce_final_map=reduce_final_map,
        reduce_partial_map=torch.empty(0, dtype=torch.int32, device=device),
        num_partial_rows=0,
    )


def split_rows(kv_indptr: Tensor, num_parts: int) -> WorkSplit:
    """The split of kv_indptr [rows + 1], rows >= 1, in fixed shapes.

    At most rows + num_parts - 1 items, each start a row's or a worker's.

    All rows lie one after the other on a line of cost, row t at row_cost[t]..row_cost[t + 1], of which
    the last ITEM_BLOCKS are its fixed cost. A worker that starts at v ends at
    max(v + payload - ITEM_BLOCKS, the last row end up to v + payload): after whole rows only, or inside
    a row whose partial item must pay its own fixed cost.
    """
    rows, device = kv_indptr.shape[0] - 1, kv_indptr.device
    row_kv = kv_indptr.long()
    row_blocks = (row_kv.diff() + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    row_cost = row_kv.new_zeros(rows + 1)
    row_cost[1:] = (row_blocks + ITEM_BLOCKS).cumsum(0)
    total = row_cost[-1:]
    payload = (total + num_parts - 1) // num_parts + ITEM_BLOCKS

    worker_starts = [row_cost[:1]]
    for _ in range(num_parts - 1):
        reach = worker_starts[-1] + payload
        whole_rows = row_cost.index_select(0, torch.searchsorted(row_cost, reach, right=True) - 1)
        worker_starts.append(torch.minimum(torch.maximum(reach - ITEM_BLOCKS, whole_rows), total))
    worker_bounds = torch.cat((*worker_starts, total))

    inner = worker_bounds[1:-1]
    inner_row = torch.searchsorted(row_cost, inner, right=True) - 1
    # A worker that begins with a row adds no item: moved to the end of the line, past all items.
    inner = torch.where(row_cost[inner_row] == inner, total, inner)
    starts = torch.cat((row_cost[:-1], inner)).sort().values
    work_indptr = torch.searchsorted(starts, worker_bounds)

    used = starts < total
    row = (torch.searchsorted(row_cost, starts, right=True) - 1).clamp_max(rows - 1)
    ends = torch.cat((starts[1:], total))
    row_first, row_last = row_kv[row], row_kv[row + 1]
    kv_start = row_first + (starts - row_cost[row]) * BLOCK_TOKENS
    kv_end = torch.where(
        ends < row_cost[row + 1], row_first + (ends - row_cost[row]) * BLOCK_TOKENS, row_last
    )

    row_items = torch.searchsorted(starts, row_cost)
    item_counts = row_items.diff()
    split = item_counts > 1
    reduce_indptr = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    reduce_indptr[1:] = (item_counts * split).cumsum(0)
    item_ids = torch.arange(starts.shape[0], device=device)
    partial = torch.where(split[row], reduce_indptr[row] + item_ids - row_items[row], -1)

    work_info = torch.stack(
        (row, partial, row, row + 1, kv_start, kv_end, row_last - kv_end, torch.zeros_like(row)), 1
    )
    row_ids = torch.arange(rows, dtype=torch.int32, device=device)
    final_map = torch.stack((row_ids, row_ids + 1), 1)
    max_entries = min(rows + num_parts - 1, 2 * (num_parts - 1))
    return WorkSplit(
        num_parts=num_parts,
        work_indptr=work_indptr.int(),
        work_info=(work_info * used.unsqueeze(1)).int(),
        reduce_indptr=reduce_indptr.int(),
        reduce_final_map=final_map.where(split.unsqueeze(1), -1),
        reduce_partial_map=torch.arange(max_entries, dtype=torch.int32, device=device),
        num_partial_rows=max_entries,
    )


def _cut_to_used(split: WorkSplit) -> WorkSplit:
    num_entries = int(split.reduce_indptr[-1])
    return replace(
        split,
        work_info=split.work_info[: int(split.work_indptr[-1])],
        reduce_partial_map=split.reduce_partial_map[:num_entries],
        num_partial_rows=num_entries,
    )
