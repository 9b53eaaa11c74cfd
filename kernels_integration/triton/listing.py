"""The slots of all tokens that a row sees, for dense attention. Legend: `indexer`."""

import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.triton.local_rows import LocalRows, num_seen, slot_of

_LISTED_AT_ONCE = 1024


def list_visible(rows: LocalRows, kv_indptr: Tensor, kv_indices: Tensor) -> None:
    """Slots of every token that a row sees, for dense attention; arguments as for `topk.select_best`."""
    if rows.num_rows == 0 or rows.max_visible == 0:
        return
    _list_visible[(rows.num_rows, triton.cdiv(rows.max_visible, _LISTED_AT_ONCE))](
        rows.page_table,
        rows.visible_from,
        rows.visible_to,
        rows.request,
        kv_indptr,
        kv_indices,
        rows.page_table.shape[1] * rows.page_size,
        kv_indices.shape[0],
        rows.page_table.stride(0),
        PAGE_SIZE=rows.page_size,
        BLOCK=_LISTED_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _list_visible(
    page_table,
    visible_from,
    visible_to,
    request,
    kv_indptr,
    kv_indices,
    num_tokens,
    num_indices,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first, count = num_seen(visible_from, visible_to, row, num_tokens, num_indices)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < count
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    slot = slot_of(page_table, request_at, first + column, is_token, PAGE_SIZE)
    place = tl.load(kv_indptr + row) + column
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=is_token & (place < room))
