"""The torch backend."""

import torch
from torch import Tensor

from kernels_integration.backend import Backend, Routing
from kernels_integration.dcp import DcpGroup, merge_attention
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.kv_layout import INDEXER_KV_DTYPES, KV_CACHE_DTYPES
from kernels_integration.plan import SparseMLAPlan, plan_from_indptr
from kernels_integration.reference import attention, drawing, layers, selection
from kernels_integration.reference.experts import SortedExperts, route, swiglu
from kernels_integration.reference.linear import MatrixProduct
from kernels_integration.reference.rows import in_groups, store
from kernels_integration.registry import Capabilities, Needs
from kernels_integration.rows import Rows, Selection
from kernels_integration.sampling import SamplingRows
from kernels_integration.weight import Weight, accumulate_dtype

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "float64", "bfloat16"}),
    kv_cache_dtypes=frozenset(KV_CACHE_DTYPES),
    indexer_kv_dtypes=frozenset(INDEXER_KV_DTYPES),
)


def refusal(needs: Needs) -> str | None:
    if needs.device == "cuda" and not torch.cuda.is_available():
        return "this machine's torch finds no GPU"
    return CAPABILITIES.refusal(needs)


def create(needs: Needs) -> Backend:
    return TorchBackend(getattr(torch, needs.dtype), torch.device(needs.device))


class TorchBackend:
    """Plans without a split: attention here runs row by row."""

    name = "torch"
    arithmetic = "torch"
    keeps_transposes = True
    is_capturable = False
    keeps_fp8 = False

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        """dtype: what fp8 weights become."""
        self._dtype = dtype
        self.device = torch.device(device)

    def linear(self, weight: Weight) -> MatrixProduct:
        return MatrixProduct(weight.dequantized(self._dtype))

    def experts(self, gate_up: Weight, down: Weight, *, first_expert: int, num_experts: int) -> SortedExperts:
        return SortedExperts(
            gate_up.dequantized(self._dtype),
            down.dequantized(self._dtype),
            first_expert=first_expert,
            num_experts=num_experts,
        )

    def head_product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        product = torch.bmm(x.to(weight.dtype).transpose(0, 1), weight).transpose(0, 1)
        return product if out is None else out.copy_(product)

    def embed(self, token_ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        return layers.embed(token_ids, table, first_id)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return layers.rms_norm(x, weight, eps)

    def add_rms_norm(self, h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        h += x
        return layers.rms_norm(h, weight, eps)

    def rotary_table(self, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
        return layers.rotary_table(positions, frequencies, factor)

    def rotate(self, x: Tensor, rope: Tensor, out: Tensor | None = None) -> None:
        layers.rotate_pairs(x, rope, out)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def route(self, x: Tensor, weight: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(x, weight, bias, routing)

    def write_latents(
        self,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        rope: Tensor,
        cache: StoredVectors,
        rows: Rows,
    ) -> None:
        c = latents[:, : norm.shape[0]]
        c.copy_(layers.rms_norm(c, norm, eps))
        layers.rotate_pairs(latents[:, norm.shape[0] :], rope)
        store(latents, cache, rows)

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
        keys = layers.layer_norm(keys, norm, norm_bias, eps)
        layers.rotate_pairs(keys[:, : 2 * rope.shape[1]], rope)
        store(keys, cache, rows)

    def select_visible(self, rows: Rows, dcp: DcpGroup) -> Selection:
        return selection.select_visible(in_groups(rows, dcp))

    def select_topk(
        self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Rows, topk: int, dcp: DcpGroup
    ) -> Selection:
        return selection.select_topk(q, weights, keys, in_groups(rows, dcp), topk, dcp)

    def plan(self, selection: Selection, like: SparseMLAPlan | None = None) -> SparseMLAPlan:
        return plan_from_indptr(selection.kv_indptr, None, kv_indices=selection.kv_indices)

    def attention_dtype(self, dtype: torch.dtype, *, is_merged: bool) -> torch.dtype:
        return accumulate_dtype(dtype)

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        attention.run(plan, q, kv, o, lse, sm_scale=sm_scale)

    def draw(self, logits: Tensor, vocab_start: int, rows: SamplingRows, *, has_filters: bool) -> Tensor:
        return drawing.draw(logits, vocab_start, rows, has_filters=has_filters)

    def merge(self, o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
        return merge_attention(o, lse, dcp)
