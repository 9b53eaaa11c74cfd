"""Best entries of rows, ties to the lower column: what torch.topk leaves undefined, and faster maxima."""

import numpy as np
import torch
from torch import Tensor

_BLOCK = 64
_KEY_ROWS = 16  # keys of 16 rows of 6144 stay in a core's L2 cache


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """([R] values, [R] int64 columns) of the best entry of each row; equal entries: the lowest column.

    NaN wins, as in torch.max. torch.max with indices walks a row entry by entry; two levels let the first be
    vectorised: 395 us against 55 us for 128 rows of 6144 on one core.
    """
    num_rows, num_columns = x.shape
    body = num_columns - num_columns % _BLOCK
    if num_rows < 4 or body == 0:
        values, columns = x.max(dim=1)
        return values, columns
    blocks = x[:, :body].reshape(num_rows, -1, _BLOCK)
    values, block = blocks.amax(dim=2).max(dim=1)
    inside = blocks[torch.arange(num_rows, device=x.device), block].max(dim=1).indices
    columns = block.mul_(_BLOCK).add_(inside)
    if body < num_columns:
        tail_values, tail_columns = x[:, body:].max(dim=1)
        in_tail = (tail_values > values) | (tail_values.isnan() & ~values.isnan())
        values = torch.where(in_tail, tail_values, values)
        columns = torch.where(in_tail, tail_columns + body, columns)
    return values, columns


def row_top(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """([R, count] values, [R, count] int64 columns), best first; equal entries: lowest column first.

    1 <= count <= columns of x; x float32 or float64 without NaN. Which of several -inf entries are returned
    is left open. A value of -0.0 may come back as 0.0.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        if len(x) <= _KEY_ROWS:
            return _top_by_key(x, count)
        parts = [_top_by_key(x[row : row + _KEY_ROWS], count) for row in range(0, len(x), _KEY_ROWS)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    num_columns = x.shape[1]
    if count == num_columns:
        ordered = x.sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    # One more than asked shows whether a tie straddles the cut; only such rows need the full sort.
    values, columns = x.topk(count + 1, dim=1)
    # Among -inf entries the order does not matter: they are nobody's candidates.
    tied = (values[:, count - 1] == values[:, count]) & (values[:, count] > -torch.inf)
    columns = columns[:, :count].sort(dim=1).values
    ordered = x.gather(1, columns).sort(dim=1, descending=True, stable=True)
    values, columns = ordered.values, columns.gather(1, ordered.indices)
    if bool(tied.any()):
        full = x[tied].sort(dim=1, descending=True, stable=True)
        values[tied] = full.values[:, :count]
        columns[tied] = full.indices[:, :count]
    return values, columns


def _top_by_key(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """row_top of float32: value and column in one int64 key, so ties need no care.

    NumPy partitions and sorts keys with vector instructions: the 256 best of 6144 take 4 us a row where
    torch.topk takes 68.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).long().bitwise_left_shift_(32).bitwise_or_(torch.arange(x.shape[1]))
    best = keys.numpy()
    if count < x.shape[1]:
        best = np.partition(best, count - 1, axis=1)[:, :count]
    ordered = torch.from_numpy(np.sort(best, axis=1))
    ascending = ~(ordered >> 32).int()
    values = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, ordered & 0xFFFFFFFF
