"""The native backend: what the torch backend computes, as one call of compiled code for each operation.

What the C code does not take (fp8 caches, DCP's selection, rows of a device) is left to the torch backend,
whose results it shares up to the order of sums.
"""

import torch
from torch import Tensor

from kernels_integration.backend import Backend, Routing
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import PlainFormat, StoredVectors
from kernels_integration.native.build import BuildError
from kernels_integration.native.library import checked, library
from kernels_integration.native.products import PackedExperts, PackedProduct, packed
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.plan_check import check_fit
from kernels_integration.reference import layers
from kernels_integration.reference.backend import CAPABILITIES as TORCH_CAPABILITIES
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.registry import Capabilities, Needs
from kernels_integration.rows import RowBatch, RowGroup, Rows, Selection
from kernels_integration.weight import Weight

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_cache_dtypes=TORCH_CAPABILITIES.kv_cache_dtypes,
    indexer_kv_dtypes=TORCH_CAPABILITIES.indexer_kv_dtypes,
    is_deterministic=True,
)


def refusal(needs: Needs) -> str | None:
    reason = CAPABILITIES.refusal(needs)
    if reason is not None:
        return reason
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def create(needs: Needs) -> Backend:
    return NativeBackend(getattr(torch, needs.dtype))


class NativeBackend(TorchBackend):
    """Of float32 or bfloat16 models on a CPU. A row's bits do not depend on the rows beside it."""

    name = "native"
    keeps_transposes = False
    arithmetic: str

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._c = library()
        self.arithmetic = f"native, {self._c.lanes()} lanes"
        self._routers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rope_tables: dict[int, tuple[Tensor, Tensor]] = {}

    def linear(self, weight: Weight) -> PackedProduct:  # type: ignore[override]
        return PackedProduct(weight.dequantized(self._dtype))

    def experts(  # type: ignore[override]
        self, gate_up: Weight, down: Weight, *, first_expert: int, num_experts: int
    ) -> PackedExperts:
        return PackedExperts(
            gate_up.dequantized(self._dtype), down.dequantized(self._dtype), first_expert=first_expert
        )

    def head_product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        T, H, A = x.shape
        B = weight.shape[2]
        if out is None:
            out = torch.empty(T, H, B, dtype=weight.dtype)
        x, weight = _rows(x), weight.contiguous()
        checked(
            self._c.head_product,
            *(x.data_ptr(), _is_bf16(x), x.stride(0), x.stride(1), T, H, A),
            *(weight.data_ptr(), _is_bf16(weight), B),
            *(out.data_ptr(), _is_bf16(out), out.stride(0), out.stride(1)),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(_rows(x), None, weight, eps)

    def add_rms_norm(self, h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(h, _rows(x), weight, eps)

    def _norm(self, x: Tensor, addend: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        n, dim = x.shape
        out = torch.empty(n, dim, dtype=x.dtype)
        added, step = (None, 0) if addend is None else (addend.data_ptr(), addend.stride(0))
        self._c.rms_norm(
            *(x.data_ptr(), added, _is_bf16(x), x.stride(0), step, n, dim),
            *(weight.data_ptr(), eps, out.data_ptr()),
        )
        return out

    def rotary_table(self, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
        """Rows of a table of all positions so far, which are the same bits."""
        if not positions.shape[0]:
            return layers.rotary_table(positions, frequencies, factor)
        last = int(positions.max())
        known = self._rope_tables.get(id(frequencies))
        if known is None or known[1].shape[0] <= last:
            every = torch.arange(max(1024, 2 * last))
            # With the frequencies, whose id stays theirs so.
            known = (frequencies, layers.rotary_table(every, frequencies, factor))
            self._rope_tables[id(frequencies)] = known
        return known[1].index_select(0, positions)

    def rotate(self, x: Tensor, rope: Tensor, out: Tensor | None = None) -> None:
        out = x if out is None else out
        T, R = x.shape[0], x.shape[-1]
        flat, to = (x.view(T, 1, R), out.view(T, 1, R)) if x.dim() == 2 else (x, out)
        self._c.rotate(
            *(flat.data_ptr(), _is_bf16(x), flat.stride(0), flat.stride(1), T, flat.shape[1], R),
            *(rope.data_ptr(), to.data_ptr(), to.stride(0), to.stride(1)),
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        n, double = gate_up.shape
        out = torch.empty(n, double // 2, dtype=gate_up.dtype)
        self._c.swiglu(gate_up.data_ptr(), _is_bf16(gate_up), n, double // 2, out.data_ptr())
        return out

    def route(self, x: Tensor, weight: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        x = _rows(x)
        n, (num_experts, depth) = x.shape[0], weight.shape
        panels = self._routers.get(id(weight))
        if panels is None:
            # With the weight, whose id stays its own so.
            panels = self._routers[id(weight)] = (weight, packed(weight))
        experts = torch.empty(n, routing.topk, dtype=torch.int64)
        weights = torch.empty(n, routing.topk, dtype=torch.float32)
        checked(
            self._c.route,
            *(x.data_ptr(), _is_bf16(x), x.stride(0), n, depth, panels[1].data_ptr(), bias.data_ptr()),
            *(num_experts, routing.topk, routing.num_groups, routing.topk_group, routing.normalise),
            *(routing.scaling_factor, experts.data_ptr(), weights.data_ptr()),
        )
        return experts, weights

    def write_latents(
        self, latents: Tensor, norm: Tensor, eps: float, rope: Tensor, cache: StoredVectors, rows: Rows
    ) -> None:
        if not (isinstance(rows, RowBatch) and isinstance(cache.format, PlainFormat)):
            super().write_latents(latents, norm, eps, rope, cache, rows)
            return
        latents = _rows(latents)
        rank = norm.shape[0]
        checked(
            self._c.write_latents,
            *(latents.data_ptr(), _is_bf16(latents), latents.stride(0), rank, latents.shape[1] - rank),
            *(norm.data_ptr(), eps, rope.data_ptr(), rows.write_rows.data_ptr(), rows.write_slots.data_ptr()),
            *(rows.write_rows.shape[0], cache.storage.data_ptr(), _is_bf16(cache.storage), cache.num_slots),
        )

    def write_index_keys(
        self,
        keys: Tensor,
        norm: Tensor,
        norm_bias: Tensor,
        eps: float,
        rope: Tensor,
        cache: StoredVectors,
        rows: Rows,
    ) -> None:
        if not (isinstance(rows, RowBatch) and isinstance(cache.format, PlainFormat)):
            super().write_index_keys(keys, norm, norm_bias, eps, rope, cache, rows)
            return
        keys = _rows(keys)
        checked(
            self._c.write_index_keys,
            *(keys.data_ptr(), _is_bf16(keys), keys.stride(0), keys.shape[1], 2 * rope.shape[1]),
            *(norm.data_ptr(), norm_bias.data_ptr(), eps, rope.data_ptr()),
            *(rows.write_rows.data_ptr(), rows.write_slots.data_ptr(), rows.write_rows.shape[0]),
            *(cache.storage.data_ptr(), _is_bf16(cache.storage), cache.num_slots),
        )

    def select_topk(
        self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Rows, topk: int, dcp: DcpGroup
    ) -> Selection:
        is_plain = isinstance(rows, RowBatch) and isinstance(keys.format, PlainFormat) and dcp.size == 1
        if not is_plain or rows.max_visible <= topk:
            return super().select_topk(q, weights, keys, rows, topk, dcp)
        assert isinstance(rows, RowBatch)
        q, weights = q.contiguous(), weights.contiguous()
        (T, H, D), size = q.shape, q.element_size()
        most = sum(min(topk, group.kv_positions.shape[0]) * _num_rows(group) for group in rows.groups)
        indptr = torch.zeros(T + 1, dtype=torch.int32)
        chosen = torch.empty(most, dtype=torch.int64)
        for group in rows.groups:
            first, slots = group.row_start, group.kv_slots
            checked(
                self._c.select_topk,
                *(q.data_ptr() + first * H * D * size, _is_bf16(q), weights.data_ptr() + first * H * 4, H, D),
                *(keys.storage.data_ptr(), _is_bf16(keys.storage), keys.num_slots),
                *(slots.contiguous().data_ptr(), slots.shape[1], group.num_requests, group.rows_per_request),
                *(rows.visible_from.data_ptr() + 8 * first, rows.visible_to.data_ptr() + 8 * first, topk),
                *(indptr.data_ptr() + 4 * first, chosen.data_ptr(), torch.get_num_threads()),
            )
        return Selection(kv_indptr=indptr, kv_indices=chosen[: int(indptr[-1])])

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        is_plain = isinstance(kv.format, PlainFormat) and o.is_contiguous() and lse.is_contiguous()
        if not is_plain or q.dtype is torch.float64:
            super().attend(plan, q, kv, o, lse, sm_scale=sm_scale)
            return
        indices = check_fit(plan, q, kv, o, lse)
        q = q if q.stride(2) == 1 else q.contiguous()
        checked(
            self._c.attend,
            *(q.data_ptr(), _is_bf16(q), q.stride(0), q.stride(1), plan.rows, *q.shape[1:], o.shape[2]),
            *(plan.kv_indptr.data_ptr(), indices.data_ptr(), indices.dtype is torch.int64),
            *(kv.storage.data_ptr(), _is_bf16(kv.storage), kv.num_slots),
            *(o.data_ptr(), _is_bf16(o), lse.data_ptr(), sm_scale, torch.get_num_threads()),
        )


def _num_rows(group: RowGroup) -> int:
    return group.num_requests * group.rows_per_request


def _is_bf16(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16


def _rows(x: Tensor) -> Tensor:
    """x with the last dim contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
