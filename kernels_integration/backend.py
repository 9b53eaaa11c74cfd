"""The seam between a model and the code that computes it: the operations that every backend has.

Model code names these operations, never an implementation; `registry` chooses one. The torch backend
(kernels_integration/reference) is complete and is the oracle of all others.
Rules for all: tensors lie on the backend's device; nothing is read on the host that only a device
knows (the torch backend on a CPU may: there the device is the host); shapes depend on host integers alone,
so that a pass can be captured in a graph. What is written in place is said.

Shape legend: T packed rows, H heads, N nope dims, R rotary dims, C latent rank, V value dims, D indexer key
dims, E experts held here, K experts of a token, I an expert's width on this rank.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.rows import Rows, Selection
from kernels_integration.sampling import SamplingRows
from kernels_integration.weight import Weight


class Linear(Protocol):
    """x [n, in] -> x W^T [n, out], of a weight that it keeps in a layout of its own, in the weight's dtype.

    An x of a shorter dtype counts as it is: what decides, as the indexer's weights do, is not rounded.
    """

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Experts(Protocol):
    """The routed experts that a rank holds: E_e(x) = down(silu(gate x) * up x)."""

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, out: Tensor, /) -> Tensor:
        """out[t] += sum of weights[t, j] E_experts[t, j](x[t]) over the experts held here; returns out.

        x and out [T, hidden]; experts [T, K] int64, numbered over all ranks; weights [T, K].
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are chosen: contracts/numerics.md, "Router"."""

    topk: int
    num_groups: int
    topk_group: int
    normalise: bool
    scaling_factor: float


class Backend(Protocol):
    """The operations of one rank on one device. Errors: PlanError where a plan does not fit its tensors."""

    @property
    def name(self) -> str: ...

    @property
    def arithmetic(self) -> str:
        """What the bits of results depend on beside their inputs; the same on all ranks of a group."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_capturable(self) -> bool:
        """Whether a pass can become part of a CUDA graph: nothing waits for the host."""
        ...

    # Matrix products

    @property
    def keeps_transposes(self) -> bool:
        """Whether matrices should be read into memory as their transposes, to be used without a copy."""
        ...

    @property
    def keeps_fp8(self) -> bool:
        """Whether weights that are stored in fp8 come as they are, with scales, where a rank's part allows.

        Else they come dequantised. A weight without scales is taken in any case.
        """
        ...

    def linear(self, weight: Weight) -> Linear:
        """weight [out, in]."""
        ...

    def experts(self, gate_up: Weight, down: Weight, *, first_expert: int, num_experts: int) -> Experts:
        """gate_up [E, 2I, hidden] (gate above up) and down [E, hidden, I].

        They are of the experts from first_expert on; num_experts: of all ranks together.
        """
        ...

    def head_product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Head by head: x [T, H, A] and weight [H, A, B] -> [T, H, B], written to out (any strides)."""
        ...

    # Around the products

    def embed(self, token_ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        """[T, hidden]: rows of table [ids, hidden], which begins at first_id; zeros for ids outside it.

        first_id None: the table holds all ids, and all are legal.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """w * (x * rsqrt(mean(x^2) + eps)) over the last dim, in the weight's dtype; returns x's dtype."""
        ...

    def add_rms_norm(self, h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """h += x in place, then rms_norm(h): a residual step and the norm that follows it."""
        ...

    def rotary_table(self, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
        """What `rope` arguments take, made once a pass: factor * e^(i * position * frequency).

        positions [T], frequencies [R/2]. The layout is the backend's; its first dim is T.
        """
        ...

    def rotate(self, x: Tensor, rope: Tensor, out: Tensor | None = None) -> None:
        """RoPE over neighbouring pairs (2j, 2j+1) of x [T, ..., R], written to out or in place."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [T, I] of [gate | up] [T, 2I]."""
        ...

    def route(self, x: Tensor, weight: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Experts [T, K] int64 and their weights [T, K] of x [T, hidden], in the dtype of weight.

        weight [E_all, hidden] and bias [E_all] are float32, or float64 in a float64 model.
        """
        ...

    # The cache

    def write_latents(
        self,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        rope: Tensor,
        cache: StoredVectors,
        rows: Rows,
    ) -> None:
        """Norm the first C of latents [T, C + R], rotate the rest, and store the rows that this rank owns.

        latents may be overwritten. norm [C]. A slot outside the cache raises IndexError (on a GPU: a
        device-side assertion).
        """
        ...

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
        """LayerNorm keys [T, D], rotate their first R, and store the rows that this rank owns."""
        ...

    # Sparse attention

    def select_visible(self, rows: Rows, dcp: DcpGroup) -> Selection:
        """Every local KV token that a row may see, which is what dense attention reads."""
        ...

    def select_topk(
        self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Rows, topk: int, dcp: DcpGroup
    ) -> Selection:
        """The min(topk, visible) tokens of the highest score per row, of which this rank owns a part.

        score(t, s) = sum_h weights[t, h] * relu(q[t, h] . keys[s] * D**-0.5), in float32 (float64 for a
        float64 q). Higher score first, then lower position; -0.0 equals 0.0; NaN counts as -inf. q [T, H, D];
        weights [T, H]. Every rank calls with the same q, weights and positions; the ranks' selections
        partition the top-k. Errors: CollectiveError under DCP.
        """
        ...

    def plan(self, selection: Selection, like: SparseMLAPlan | None = None) -> SparseMLAPlan:
        """The plan of a selection, with a split if this backend reads one.

        like: a plan of the same pass, whose split is used again where the lengths are known to be the same.
        """
        ...

    def attention_dtype(self, dtype: torch.dtype, *, is_merged: bool) -> torch.dtype:
        """What `attend` writes o in for q of dtype.

        is_merged: o is a rank's part, to be merged by its LSE.
        """
        ...

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        """o[t] = softmax(sm_scale q[t] . k) v over row t's planned slots of kv; lse[t] its natural LSE.

        q [>= T, H, C + R], o [as q, H, C], lse [as q, H] fp32 (fp64 for a float64 q), T = plan.rows. o and
        lse are written in place: rows without KV get o = 0, lse = -inf; rows from T on are neither read nor
        written.
        Errors: PlanError, before anything is written, when the plan does not fit the tensors.
        """
        ...

    def draw(self, logits: Tensor, vocab_start: int, rows: SamplingRows, *, has_filters: bool) -> Tensor:
        """[R] int64: argmax(logits / temperature + gumbel(seed, position, token)) over what filters leave.

        logits [R, V] float32 or float64 of the tokens from vocab_start on, edited by their rules (those of
        rows are not read). Of equal scores the lower token. NaN and +inf count as -inf; where nothing else
        is: NO_TOKEN. has_filters False: no row has any in force but top_k 1, which is greedy.
        """
        ...

    def merge(self, o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
        """Attention over the KV of all ranks for this rank's own heads: `dcp.merge_attention`."""
        ...
