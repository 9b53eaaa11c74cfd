"""Sparse MLA attention by the plan's work items, and the merge of split rows.

One latent vector of a token is key (all C + R entries) and value (the first C). Shape legend: T rows,
H heads, C latent rank, R rope part, N KV tokens of a tile.

The slots of a tile are loaded one tile ahead of its vectors, so that the loop's software pipeline can start
the gather early.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import Fp8Format, PlainFormat, StoredVectors
from kernels_integration.kv_layout import FP8_TILE
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.plan_check import check_fit
from kernels_integration.triton.attention_items import (
    MOST_SPLITS,
    FixedSplits,
    item_range,
    merge_fixed,
    merge_parts,
    read_item,
    read_slots,
    weigh,
    where_to_write,
)
from kernels_integration.triton.mla_attention_fp8 import attend_fp8
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format

_LOG2_E = 1.4426950408889634
_ROWS_PER_PART = 4
_PARTIAL_BYTES = 256 << 20
"""Of parts of rows in fixed splits at a time: rows of a long prompt are computed in turns."""
_MERGED_AT_ONCE = 8
FP8_LATENTS = (FP8_TILE, 2 * FP8_TILE, 4 * FP8_TILE)
"""Latent ranks that are read in fp8."""


def runs_rows_alone(rows: int, num_parts: int) -> bool:
    """Whether every row is a program of its own: of many rows for each worker splitting brings nothing."""
    return num_parts == 1 or rows >= _ROWS_PER_PART * num_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """How the kernel is cut; which is fastest depends on heads, types and device, the result does not."""

    heads: int
    tokens: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(
        cls,
        rows: int,
        num_heads: int,
        q_dtype: torch.dtype,
        kv_item_bytes: int,
        fixed: FixedSplits | None = None,
    ) -> "AttentionTiles":
        """As measured fastest on an H200 among some ten for each case. fixed: then rows are not looked at."""
        if q_dtype == torch.float32:
            return cls(heads=16, tokens=16, num_warps=4, num_stages=1)
        if num_heads > 16:
            heads = 64 if num_heads > 32 else 32
            return cls(heads=heads, tokens=32 if kv_item_bytes == 1 else 64, num_warps=8, num_stages=2)
        if fixed is not None and (kv_item_bytes == 1 or fixed.tile_rows >= 32):
            return cls(heads=16, tokens=64, num_warps=4, num_stages=2)
        # A plan cuts few rows into items of a tile or two, of which a large one would stay half empty.
        if fixed is None and rows < (8 if kv_item_bytes == 1 else 4):
            return cls(heads=16, tokens=32, num_warps=4, num_stages=3)
        if kv_item_bytes > 1:
            return cls(heads=16, tokens=64, num_warps=8, num_stages=3)
        return cls(heads=16, tokens=128, num_warps=8, num_stages=2)


def run(
    plan: SparseMLAPlan,
    q: Tensor,
    kv: StoredVectors,
    o: Tensor,
    lse: Tensor,
    *,
    sm_scale: float,
    tiles: AttentionTiles | None = None,
    fixed: FixedSplits | None = None,
) -> None:
    """`attention.run` on a GPU: row t attends to its planned slots of kv. Writes o and lse in place.

    q [>= T, H, C + R] bfloat16, float16 or float32, last dim contiguous; products are in q's dtype, sums in
    float32. kv of the same width: plain, or fp8 with whole tiles of 128 values. o [as q, H, C] in any
    floating dtype, lse [as q, H] float32. A slot below 0 counts as absent; a row without KV gets o = 0,
    lse = -inf. Rows from T = plan.rows on are neither read nor written. The order of summation depends on
    the plan alone; in fixed splits on each row's own number of tokens (the plan's split is not read), so that
    a row has the same bits beside any others.

    Errors: PlanError, before anything is written, when the plan does not fit the tensors or the types are
    not among these.
    """
    kv_indices = check_fit(plan, q, kv, o, lse)
    _require_types(q, kv)
    if plan.rows == 0:
        return
    if fixed is None:
        _run(plan, kv_indices, q, kv, o, lse, sm_scale, tiles, None)
        return
    rows_at_once = max(1, _PARTIAL_BYTES // (4 * fixed.most_parts * o.shape[1] * o.shape[2]))
    for start in range(0, plan.rows, rows_at_once):
        end = min(start + rows_at_once, plan.rows)
        part = replace(plan, rows=end - start, kv_indptr=plan.kv_indptr[start : end + 1], split=None)
        own = slice(start, end)
        _run(part, kv_indices, q[own], kv, o[own], lse[own], sm_scale, tiles, fixed)


def _run(
    plan: SparseMLAPlan,
    kv_indices: Tensor,
    q: Tensor,
    kv: StoredVectors,
    o: Tensor,
    lse: Tensor,
    sm_scale: float,
    tiles: AttentionTiles | None,
    fixed: FixedSplits | None,
) -> None:
    splits = 0 if fixed is None else fixed.most_parts
    H, C = o.shape[1], o.shape[2]
    R = kv.dim - C
    storage, split = kv.storage, plan.split
    fp8 = fp8_format(kv)
    tiles = tiles or AttentionTiles.choose(plan.rows, H, q.dtype, storage.element_size(), fixed)
    rows_alone = splits == 1 or (
        not splits and (split is None or runs_rows_alone(plan.rows, split.num_parts))
    )
    # Where they are not told, nothing of these is read.
    work_indptr, work_info, num_programs, partial_rows = plan.kv_indptr, plan.kv_indptr, plan.rows, 0
    if splits > 1:
        num_programs = partial_rows = plan.rows * splits
    elif not rows_alone:
        assert split is not None
        work_indptr, work_info = split.work_indptr, split.work_info
        num_programs, partial_rows = split.num_parts, split.num_partial_rows
    partial_o = torch.empty(max(partial_rows, 1), H, C, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(max(partial_rows, 1), H, dtype=torch.float32, device=q.device)
    head_tiles = triton.cdiv(H, tiles.heads)
    # Neighbouring programs share a part's KV: the second finds it in the L2 cache.
    grid = (head_tiles * num_programs,)
    cut = {
        "SPLITS": splits if splits > 1 else 0,
        "SPLIT_TOKENS": 0 if fixed is None else fixed.tokens,
        "MOST_SPLITS": MOST_SPLITS,
    }
    common = {
        "q": q,
        "kv_indices": kv_indices,
        "kv_indptr": plan.kv_indptr,
        "work_indptr": work_indptr,
        "work_info": work_info,
        "o": o,
        "lse": lse,
        "partial_o": partial_o,
        "partial_lse": partial_lse,
        "max_items": work_info.shape[0],
        "num_indices": kv_indices.shape[0],
        "num_heads": H,
        "score_scale": sm_scale * _LOG2_E,
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_o_row": o.stride(0),
        "stride_o_head": o.stride(1),
        "stride_lse_row": lse.stride(0),
        "HEAD_TILES": head_tiles,
        "ROWS_ALONE": rows_alone,
        **cut,
        "C": C,
        "R": R,
        "BLOCK_R": dot_size(R),
        "BLOCK_H": tiles.heads,
        "BLOCK_N": tiles.tokens,
        "PRECISION": dot_precision(q.dtype),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    if fp8 is not None:
        layout = fp8.layout
        attend_fp8[grid](
            **common,
            kv_bytes=storage,
            kv_scales=storage.view(torch.float32),
            kv_rope=storage.view(torch.bfloat16),
            stride_kv=storage.stride(0),
            SCALES_AT=layout.scales_start // 4,
            ROPE_AT=layout.bf16_start // 2,
            NUM_TILES=layout.num_tiles,
            TILE=FP8_TILE,
        )
    else:
        _attend_plain[grid](**common, kv=storage, stride_kv=storage.stride(0), BLOCK_C=dot_size(C))
    if splits > 1:
        block_c = min(128, triton.next_power_of_2(C))
        merge_fixed[(plan.rows, H, triton.cdiv(C, block_c))](
            partial_o,
            partial_lse,
            plan.kv_indptr,
            o,
            lse,
            kv_indices.shape[0],
            H,
            o.stride(0),
            o.stride(1),
            lse.stride(0),
            C=C,
            BLOCK_C=block_c,
            AT_ONCE=_MERGED_AT_ONCE,
            **cut,
            num_warps=1,
        )
    elif partial_rows:
        assert split is not None
        # Of few rows each is in many parts, of many rows hardly any.
        at_once, columns = (64, 64) if plan.rows <= 4 else (32, 128) if plan.rows <= 16 else (4, 512)
        block_c = min(columns, triton.next_power_of_2(C))
        merge_parts[(plan.rows, H, triton.cdiv(C, block_c))](
            partial_o,
            partial_lse,
            split.reduce_indptr,
            split.reduce_partial_map,
            o,
            lse,
            split.reduce_partial_map.shape[0],
            H,
            o.stride(0),
            o.stride(1),
            lse.stride(0),
            C=C,
            BLOCK_C=block_c,
            BLOCK_ENTRIES=triton.next_power_of_2(split.num_parts),
            BLOCK_S=at_once,
            num_warps=4 if plan.rows <= 4 else 2,
        )


def _require_types(q: Tensor, kv: StoredVectors) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise PlanError(f"q of {q.dtype}: the Triton kernel takes bfloat16, float16 and float32; use torch's")
    if q.stride(2) != 1:
        raise PlanError("q's last dimension must be contiguous for the Triton kernel")
    known = isinstance(kv.format, PlainFormat) or (
        isinstance(kv.format, Fp8Format) and kv.format.layout.num_fp8 in FP8_LATENTS
    )
    if not known:
        raise PlanError(
            f"KV in {kv.format}: the Triton kernel reads plain vectors, "
            "and fp8 latents of 128, 256 or 512 values"
        )


@triton.jit
def _attend_plain(
    q,
    kv,
    kv_indices,
    kv_indptr,
    work_indptr,
    work_info,
    o,
    lse,
    partial_o,
    partial_lse,
    max_items,
    num_indices,
    num_heads,
    score_scale,
    stride_q_row,
    stride_q_head,
    stride_kv,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    HEAD_TILES: tl.constexpr,
    ROWS_ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    column = tl.arange(0, BLOCK_C)
    rope_column = tl.arange(0, BLOCK_R)
    in_c = column < C
    in_r = rope_column < R
    token = tl.arange(0, BLOCK_N)
    dtype = q.dtype.element_ty
    first, end = item_range(
        work_indptr,
        max_items,
        kv_indptr,
        num_indices,
        HEAD_TILES,
        ROWS_ALONE,
        SPLITS,
        SPLIT_TOKENS,
        MOST_SPLITS,
    )
    for item in range(first, end):
        row, partial, kv_start, kv_end = read_item(
            item, kv_indptr, work_info, num_indices, ROWS_ALONE, SPLITS, SPLIT_TOKENS, MOST_SPLITS
        )
        q_at = q + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head
        q_c = tl.load(q_at + column[None, :], mask=is_head[:, None] & in_c[None, :], other=0.0)
        q_r = tl.load(q_at + C + rope_column[None, :], mask=is_head[:, None] & in_r[None, :], other=0.0)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        slot = read_slots(kv_indices, kv_start + token, kv_end)
        for start in range(kv_start, kv_end, BLOCK_N):
            next_slot = read_slots(kv_indices, start + BLOCK_N + token, kv_end)
            present = slot >= 0
            kv_at = kv + slot[:, None] * stride_kv
            latent = tl.load(kv_at + column[None, :], mask=present[:, None] & in_c[None, :], other=0.0)
            rope = tl.load(kv_at + C + rope_column[None, :], mask=present[:, None] & in_r[None, :], other=0.0)
            latent = latent.to(dtype)
            scores = tl.dot(q_c, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(q_r, tl.trans(rope.to(dtype)), scores, input_precision=PRECISION)
            weights, peak, kept = weigh(scores * score_scale, present, peak)
            total = total * kept + tl.sum(weights, 1)
            acc = tl.dot(weights.to(dtype), latent, acc * kept[:, None], input_precision=PRECISION)
            slot = next_slot
        o_at, lse_at, partial_o_at, partial_lse_at = where_to_write(
            row,
            partial,
            head,
            o,
            lse,
            partial_o,
            partial_lse,
            num_heads,
            stride_o_row,
            stride_o_head,
            stride_lse_row,
            C,
        )
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        acc = acc / divisor[:, None]
        row_lse = tl.where(some, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        mask = is_head[:, None] & in_c[None, :]
        if partial < 0:
            tl.store(o_at[:, None] + column[None, :], acc.to(o.dtype.element_ty), mask=mask)
            tl.store(lse_at, row_lse, mask=is_head)
        else:
            tl.store(partial_o_at[:, None] + column[None, :], acc, mask=mask)
            tl.store(partial_lse_at, row_lse, mask=is_head)
