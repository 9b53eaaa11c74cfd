"""A backend whose operations are spans with the work they had to do: what `latentray bench --profile` reads.

Bytes are those that must be read or written once, flops two for each multiply-add. What an implementation
moves or computes beside them does not count.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.spans import Spans
from kernels_integration.weight import Weight

if TYPE_CHECKING:
    from kernels_integration.backend import Backend

PREFIX = "op "
"""What the names of these spans begin with."""
_TIMED = (
    *("rms_norm", "add_rms_norm", "rotary_table", "rotate", "swiglu", "route", "write_latents"),
    *("write_index_keys", "select_visible", "plan", "merge"),
)
"""Operations whose work is the reading of their tensors and the writing of their result."""


def profiled(backend: "Backend", spans: Spans) -> "Backend":
    """The backend with a span around each operation; for steps whose results the host waits for."""
    return cast("Backend", _ProfiledBackend(backend, spans))


class _ProfiledBackend:
    def __init__(self, inner: "Backend", spans: Spans) -> None:
        self._inner = inner
        self._spans = spans
        for name in _TIMED:
            setattr(self, name, self._timed(name, getattr(inner, name)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _timed(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._spans(PREFIX + name, num_bytes=_bytes(args)):
                return operation(*args, **kwargs)

        return timed

    def linear(self, weight: Weight) -> Callable[[Tensor], Tensor]:
        (out, depth), product, spans = weight.shape, self._inner.linear(weight), self._spans
        weight_bytes = _bytes((weight.values, weight.scales))
        name = f"{PREFIX}linear {depth} -> {out}"

        def timed(x: Tensor) -> Tensor:
            rows = x.shape[0]
            num_bytes = weight_bytes + rows * (depth + out) * x.element_size()
            with spans(name, num_bytes=num_bytes, num_flops=2 * rows * depth * out):
                return product(x)

        return timed

    def experts(self, gate_up: Weight, down: Weight, **numbers: int) -> Callable[..., Tensor]:
        experts, spans = self._inner.experts(gate_up, down, **numbers), self._spans
        each = _bytes((gate_up.values, gate_up.scales, down.values, down.scales)) // max(1, down.shape[0])
        flops = 2 * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])
        held = range(numbers["first_expert"], numbers["first_expert"] + down.shape[0])

        def timed(x: Tensor, chosen: Tensor, weights: Tensor, out: Tensor) -> Tensor:
            mine = [expert for expert in chosen.flatten().tolist() if expert in held]
            num_bytes = len(set(mine)) * each + _bytes((x, chosen, weights, out, out))
            with spans(PREFIX + "experts", num_bytes=num_bytes, num_flops=len(mine) * flops):
                return experts(x, chosen, weights, out)

        return timed

    def embed(self, token_ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
        num_bytes = 2 * token_ids.shape[0] * table.shape[1] * table.element_size()
        with self._spans(PREFIX + "embed", num_bytes=num_bytes):
            return self._inner.embed(token_ids, table, first_id)

    def head_product(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        num_bytes = _bytes((x, weight)) + rows * weight.shape[0] * weight.shape[2] * weight.element_size()
        with self._spans(PREFIX + "head_product", num_bytes=num_bytes, num_flops=2 * rows * weight.numel()):
            return self._inner.head_product(x, weight, out)

    def select_topk(self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Any, *rest: Any) -> Any:
        seen = int((rows.visible_to - rows.visible_from).clamp_min(0).sum())
        num_bytes, num_flops = (
            seen * _row_bytes(keys) + _bytes((q, weights)),
            2 * seen * q.shape[1] * q.shape[2],
        )
        with self._spans(PREFIX + "select_topk", num_bytes=num_bytes, num_flops=num_flops):
            return self._inner.select_topk(q, weights, keys, rows, *rest)

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        read = int(plan.kv_indptr[-1])
        num_bytes = read * _row_bytes(kv) + _bytes((q, o, lse))
        num_flops = 2 * read * q.shape[1] * (q.shape[2] + o.shape[2])
        with self._spans(PREFIX + "attend", num_bytes=num_bytes, num_flops=num_flops):
            self._inner.attend(plan, q, kv, o, lse, sm_scale=sm_scale)

    def draw(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._spans(PREFIX + "draw", num_bytes=_bytes((logits,))):
            return self._inner.draw(logits, *args, **kwargs)


def _bytes(values: tuple[Any, ...]) -> int:
    """Of the tensors among values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def _row_bytes(vectors: StoredVectors) -> int:
    return vectors.storage.shape[1] * vectors.storage.element_size()
