"""Rows as the kernels see them: which of its request's local tokens each row sees, and where they lie.

T rows, B requests, P pages of a request.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    """Which tokens of its request each row sees on this rank, and where they lie."""

    visible_from: Tensor
    """[T] int32 or int64"""
    visible_to: Tensor
    """[T]; at most visible_from: the row sees nothing."""
    request: Tensor
    """[T] int32 or int64: a row of page_table."""
    page_table: Tensor
    """[B, P] int32 or int64: the block of every page_size tokens; with page_size 1 their slots."""
    page_size: int
    max_visible: int
    """The host's upper bound of visible_to - visible_from."""
    rows_per_request: int = 1
    """R: rows b * R .. b * R + R - 1 are of one request and see from the same token on."""

    @property
    def num_rows(self) -> int:
        return self.visible_to.shape[0]

    def part(self, start: int, end: int) -> "LocalRows":
        """Rows start..end - 1. They divide into whole requests where start and end do."""
        is_whole = start % self.rows_per_request == 0 == end % self.rows_per_request
        return LocalRows(
            visible_from=self.visible_from[start:end],
            visible_to=self.visible_to[start:end],
            request=self.request[start:end],
            page_table=self.page_table,
            page_size=self.page_size,
            max_visible=self.max_visible,
            rows_per_request=self.rows_per_request if is_whole else 1,
        )


@triton.jit
def num_seen(visible_from, visible_to, row, num_tokens, most):
    """(first token, number of tokens) of a row: inside its pages, and no more than `most`."""
    first = tl.maximum(tl.load(visible_from + row), 0).to(tl.int32)
    end = tl.minimum(tl.load(visible_to + row), num_tokens).to(tl.int32)
    return first, tl.minimum(tl.maximum(end - first, 0), most)


@triton.jit
def slot_of(page_table, request_at, token, mask, PAGE_SIZE: tl.constexpr):
    """int64 slots of tokens; request_at: where the request's pages begin."""
    block = tl.load(page_table + request_at + token // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    return block * PAGE_SIZE + token % PAGE_SIZE
