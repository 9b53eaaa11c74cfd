"""Routing and routed experts in torch.

T packed rows, E experts held here, K experts per token, I the width of an expert on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_integration.backend import Routing
from kernels_integration.reference.linear import MatrixProduct


def route(x: Tensor, weight: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Sigmoid routing with a correction bias and group limit ("noaux_tc"; DeepSeek-V3, section 2.1.2).

    p = sigmoid(x Wg^T), c = p + bias; keep the topk_group groups with the largest sum of their 2 best c,
    of those the K best c; weights are their p.
    """
    p = (x.to(weight.dtype) @ weight.t()).sigmoid_()
    c = p + bias
    if routing.topk_group < routing.num_groups:
        grouped = c.view(c.shape[0], routing.num_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        kept = group_scores.topk(routing.topk_group, dim=-1, sorted=False).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        c = grouped.masked_fill_(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    experts = c.topk(routing.topk, dim=-1, sorted=False).indices
    weights = p.gather(1, experts)
    if routing.normalise:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return experts, weights.mul_(routing.scaling_factor)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [n, I] of [gate | up] [n, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class SortedExperts:
    """Experts that run one after the other, each over the rows that were sent to it."""

    def __init__(self, gate_up: Tensor, down: Tensor, *, first_expert: int, num_experts: int) -> None:
        """gate_up [E, 2I, hidden], down [E, hidden, I]; not copied where their transposes are contiguous."""
        self._first_expert = first_expert
        self._num_experts = num_experts
        self._experts = [
            (MatrixProduct(one_gate_up), MatrixProduct(one_down))
            for one_gate_up, one_down in zip(gate_up, down, strict=True)
        ]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        add = self._add_one_row if len(x) == 1 else self._add_sorted
        return add(out, x, experts, weights.to(x.dtype))

    def _add_one_row(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        for expert, weight in zip(experts.tolist()[0], weights.tolist()[0], strict=True):
            local = expert - self._first_expert
            if 0 <= local < len(self._experts):
                out.add_(self._run(local, x), alpha=weight)
        return out

    def _add_sorted(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, so that each hit expert is one product over its rows.

        On the bundled checkpoint the layer takes 0.16, 0.50 and 1.35 ms for 4, 32 and 128 rows so; all
        experts over all rows take 0.20, 0.95 and 3.3 ms (AMD EPYC, one thread, both by MKL).
        """
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts).tolist()
        begin, end = self._first_expert, self._first_expert + len(self._experts)
        before, counts = sum(counts[:begin]), counts[begin:end]
        if not any(counts):
            return out
        order = experts.flatten().argsort(stable=True)[before : before + sum(counts)]
        rows = order // experts.shape[1]
        sorted_x = x.index_select(0, rows)
        parts, start = [], 0
        for local, count in enumerate(counts):
            if count:
                parts.append(self._run(local, sorted_x[start : start + count]))
                start += count
        routed = torch.cat(parts).mul_(weights.flatten()[order].unsqueeze(-1))
        return out.index_add_(0, rows, routed)

    def _run(self, local: int, x: Tensor) -> Tensor:
        gate_up, down = self._experts[local]
        return down(swiglu(gate_up(x)))
