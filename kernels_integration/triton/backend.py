"""The Triton backend: kernels of this folder, and torch's library for plain matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_integration.backend import Backend, Linear, Routing
from kernels_integration.dcp import DcpGroup, merge_attention
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.kv_layout import FP8_DS_MLA, FP8_TILE
from kernels_integration.plan import SparseMLAPlan, plan_from_indptr
from kernels_integration.reference import layers, selection
from kernels_integration.reference.rows import in_groups
from kernels_integration.registry import Capabilities, Needs
from kernels_integration.rows import Rows, Selection
from kernels_integration.sampling import SamplingRows
from kernels_integration.triton import (
    activation,
    cache_write,
    exact_product,
    experts,
    filters,
    indexer,
    listing,
    mla_attention,
    norms,
    plan_build,
    products,
    router,
    sampling,
)
from kernels_integration.triton.attention_items import FixedSplits, even_splits
from kernels_integration.triton.local_rows import LocalRows
from kernels_integration.triton.rows import local_rows, slots_of
from kernels_integration.triton.topk import select_best
from kernels_integration.weight import Weight

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_cache_dtypes=frozenset({"float32", "bfloat16", FP8_DS_MLA}),
    indexer_kv_dtypes=frozenset({"float32", "bfloat16", "fp8"}),
    is_deterministic=True,
)
_MIN_CAPABILITY = (9, 0)
_SCORE_BYTES = 512 << 20
"""Of indexer scores at a time: rows of a long prompt are scored in turns."""


def refusal(needs: Needs) -> str | None:
    if not torch.cuda.is_available():
        return "this machine's torch finds no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, it needs 9.0 or higher"
    if needs.kv_cache_dtype == FP8_DS_MLA and needs.latent_rank not in mla_attention.FP8_LATENTS:
        sizes = ", ".join(map(str, mla_attention.FP8_LATENTS))
        return f"it does not take {FP8_DS_MLA} latents of {needs.latent_rank} values, only {sizes}"
    if needs.indexer_kv_dtype == "fp8" and needs.index_dim > FP8_TILE:
        return f"it does not take fp8 indexer keys of {needs.index_dim} values, only up to {FP8_TILE}"
    reason = CAPABILITIES.refusal(needs)
    if reason is None:
        _probe()
    return reason


def create(needs: Needs) -> Backend:
    dtype, device = getattr(torch, needs.dtype), torch.device(needs.device)
    return TritonBackend(dtype, device, deterministic=needs.deterministic)


def _probe() -> None:
    """Compile and run one kernel: a driver or compiler that does not fit raises here, not in a request."""
    x = torch.ones(1, 16, device="cuda")
    norms.rms_norm(x, x[0], 0.0, x)
    if not torch.allclose(x, torch.ones_like(x)):
        raise RuntimeError("a kernel compiled here gives wrong numbers")


class GroupedExperts:
    """Routed experts as two grouped products."""

    def __init__(self, gate_up: Tensor, down: Tensor, first_expert: int, *, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()
        self._first_expert = first_expert

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        tiles = experts.group_pairs(chosen, self._gate_up.shape[0], self._first_expert)
        experts.run_experts(
            x, self._gate_up, self._down, tiles, weights, out, weight_first=self._deterministic
        )
        return out


class MatrixProduct:
    """x [n, in] -> x W^T [n, out]: of few rows by a kernel of this folder, of more by torch's library.

    deterministic: by the kernel in any case.
    """

    def __init__(self, weight: Tensor, *, deterministic: bool) -> None:
        self._weight = weight.contiguous()
        self._product = products.FixedProduct(self._weight)
        is_half = weight.dtype == torch.bfloat16
        self._most_rows = None if deterministic else products.FEW_ROWS if is_half else 0

    def __call__(self, x: Tensor) -> Tensor:
        if _is_exact(x, self._weight):
            return exact_product.exact_product(x, self._weight)
        x = x.to(self._weight.dtype)
        if self._most_rows is None or x.shape[0] <= self._most_rows:
            return self._product(x)
        return F.linear(x, self._weight)


def _is_exact(x: Tensor, weight: Tensor) -> bool:
    """Whether bfloat16 rows meet a float32 weight."""
    return x.dtype == torch.bfloat16 and weight.dtype == torch.float32


class TritonBackend:
    """Plans with a split over the GPU's multiprocessors; products are in the model's dtype, sums in float32.

    What the rows of a pass need in the kernels' form is made once a pass: the last rows are remembered.
    """

    name = "triton"
    keeps_transposes = False
    keeps_fp8 = False
    is_capturable = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        num_parts: int = 0,
        *,
        deterministic: bool = False,
    ) -> None:
        """dtype: what fp8 weights become. num_parts: workers of a plan; 0: one for each multiprocessor.

        deterministic: every row has the same bits whatever rows are beside it (contracts/device_step.md 5).
        """
        self._deterministic = deterministic
        self.arithmetic = "triton, deterministic" if deterministic else "triton"
        self._dtype = dtype
        self.device = torch.device(device)
        self._num_parts = num_parts or _num_multiprocessors(self.device)
        self._last_rows: tuple[Rows, _PassRows] | None = None
        self._of_chosen: Tensor | None = None
        """kv_indptr of the last rows that chose among more tokens than they may keep."""

    def linear(self, weight: Weight) -> Linear:
        return MatrixProduct(weight.dequantized(self._dtype), deterministic=self._deterministic)

    def experts(
        self, gate_up: Weight, down: Weight, *, first_expert: int, num_experts: int
    ) -> GroupedExperts:
        return GroupedExperts(
            gate_up.dequantized(self._dtype),
            down.dequantized(self._dtype),
            first_expert,
            deterministic=self._deterministic,
        )

    def head_product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2], dtype=weight.dtype)
        x = x.to(weight.dtype)
        is_few = x.dtype == torch.bfloat16 and x.shape[0] <= products.FEW_ROWS
        if self._deterministic or is_few:
            products.head_product(x, weight, out)
        else:
            torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out

    def embed(self, token_ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        return layers.embed(token_ids, table, first_id)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norms.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(h)
        norms.add_rms_norm(x, h, weight, eps, out)
        return out

    def rotary_table(self, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
        """[T, R/2, 2] float32: cosine and sine."""
        return torch.view_as_real(layers.rotary_table(positions, frequencies, factor))

    def rotate(self, x: Tensor, rope: Tensor, out: Tensor | None = None) -> None:
        out = x if out is None else out
        norms.rotate_pairs(_with_heads(x), rope, _with_heads(out))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activation.swiglu(gate_up, out)
        return out

    def route(self, x: Tensor, weight: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        is_exact = _is_exact(x, weight)
        logits = exact_product.exact_parts(x, weight) if is_exact else self._scores(x, weight).unsqueeze(0)
        chosen = torch.empty(x.shape[0], routing.topk, dtype=torch.int64, device=x.device)
        weights = torch.empty(x.shape[0], routing.topk, dtype=torch.float32, device=x.device)
        router.route(
            logits,
            bias,
            chosen,
            weights,
            num_groups=routing.num_groups,
            topk_group=routing.topk_group,
            normalise=routing.normalise,
            scaling_factor=routing.scaling_factor,
        )
        return chosen, weights

    def _scores(self, x: Tensor, weight: Tensor) -> Tensor:
        return MatrixProduct(weight, deterministic=self._deterministic)(x)

    def write_latents(
        self, latents: Tensor, norm: Tensor, eps: float, rope: Tensor, cache: StoredVectors, rows: Rows
    ) -> None:
        cache_write.write_latents(latents, norm, eps, rope, slots_of(rows), cache)

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
        cache_write.write_index_keys(keys, norm, norm_bias, eps, rope, slots_of(rows), cache)

    def select_visible(self, rows: Rows, dcp: DcpGroup) -> Selection:
        made = self._rows_of_pass(rows, dcp)
        kv_indptr, kv_indices = made.pointers(made.local.max_visible)
        listing.list_visible(made.local, kv_indptr, kv_indices)
        return Selection(kv_indptr=kv_indptr, kv_indices=kv_indices)

    def select_topk(
        self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Rows, topk: int, dcp: DcpGroup
    ) -> Selection:
        if dcp.size > 1:
            # The ranks' candidates are merged by torch's code.
            return selection.select_topk(q, weights, keys, in_groups(rows, dcp), topk, dcp)
        if rows.max_visible <= topk:
            return self.select_visible(rows, dcp)
        made = self._rows_of_pass(rows, dcp)
        kv_indptr, kv_indices = made.pointers(topk)
        width = made.local.max_visible
        rows_at_once = max(1, _SCORE_BYTES // (4 * width))
        scores = torch.empty(min(rows.num_rows, rows_at_once), width, dtype=torch.float32, device=self.device)
        for start in range(0, rows.num_rows, rows_at_once):
            end = min(start + rows_at_once, rows.num_rows)
            part, part_scores = made.local.part(start, end), scores[: end - start]
            indexer.score_tokens(
                q[start:end], weights[start:end], keys, part, part_scores, is_fixed=self._deterministic
            )
            select_best(part_scores, part, kv_indptr[start : end + 1], kv_indices, topk=topk)
        self._of_chosen = kv_indptr
        return Selection(kv_indptr=kv_indptr, kv_indices=kv_indices)

    def plan(self, selection: Selection, like: SparseMLAPlan | None = None) -> SparseMLAPlan:
        if like is not None and like.kv_indptr is selection.kv_indptr:
            return like.with_indices(selection.kv_indices)
        rows = selection.kv_indptr.shape[0] - 1
        if self._deterministic or mla_attention.runs_rows_alone(rows, self._num_parts):
            return plan_from_indptr(selection.kv_indptr, None, kv_indices=selection.kv_indices)
        return plan_build.build_plan_from_indptr(
            selection.kv_indptr, self._num_parts, kv_indices=selection.kv_indices
        )

    def attention_dtype(self, dtype: torch.dtype, *, is_merged: bool) -> torch.dtype:
        return torch.float32 if is_merged else dtype

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        fixed, most = None, _most_tokens(plan.kv_indptr, plan.kv_bound)
        if self._deterministic:
            fixed = FixedSplits(most_tokens=most)
        elif plan.kv_indptr is self._of_chosen:
            fixed = even_splits(plan.rows, most, self._num_parts, kv.storage.element_size())
        mla_attention.run(plan, q, kv, o, lse, sm_scale=sm_scale, fixed=fixed)

    def draw(self, logits: Tensor, vocab_start: int, rows: SamplingRows, *, has_filters: bool) -> Tensor:
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        temperature = rows.temperature.masked_fill(rows.top_k == 1, 0.0).float()
        cuts = None
        if has_filters:
            cuts = filters.cut_rows(logits, temperature, rows.top_k, rows.top_p, rows.min_p)
        sampling.draw(
            logits, temperature, rows.seed, rows.position, tokens, vocab_start=vocab_start, cuts=cuts
        )
        return tokens

    def merge(self, o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
        return merge_attention(o, lse, dcp)

    def _rows_of_pass(self, rows: Rows, dcp: DcpGroup) -> "_PassRows":
        if self._last_rows is not None and self._last_rows[0] is rows:
            return self._last_rows[1]
        made = _PassRows(local_rows(rows, dcp))
        self._last_rows = rows, made
        return made


class _PassRows:
    """The rows of one pass, with the pointers that all its layers share."""

    def __init__(self, local: LocalRows) -> None:
        self.local = local
        self._indptr: dict[int, Tensor] = {}

    def pointers(self, most: int) -> tuple[Tensor, Tensor]:
        """(kv_indptr [T + 1] int32 of min(most, visible) tokens a row, room for their slots).

        The same kv_indptr every time, so that a plan's split is known to fit.
        """
        local = self.local
        if most not in self._indptr:
            counts = (local.visible_to - local.visible_from).clamp(0, most)
            self._indptr[most] = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        kv_indptr = self._indptr[most]
        on_host = kv_indptr.device.type == "cpu"  # where plans are exact: Triton's interpreter
        room = int(kv_indptr[-1]) if on_host else local.num_rows * min(most, local.max_visible)
        return kv_indptr, torch.empty(room, dtype=torch.int32, device=local.visible_to.device)


def _with_heads(x: Tensor) -> Tensor:
    """[T, H, R] of [T, ..., R]."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def _most_tokens(kv_indptr: Tensor, kv_bound: int) -> int:
    """Of a row, at most: on a device every row of `_PassRows.pointers` has as much room."""
    if kv_indptr.device.type == "cpu":
        return int(kv_indptr.diff().max()) if kv_indptr.shape[0] > 1 else 0
    return kv_bound // max(kv_indptr.shape[0] - 1, 1)


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
