"""The feed-forward part of a layer: a dense MLP, or routed and shared experts.

T packed rows, E experts, K experts per token, I the width of an expert on this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.linear import Linear
from actors.model.weights import WeightReader, accumulate_dtype


class SwiGluMlp:
    """down(silu(gate x) * up x), its width split over ranks: returns this rank's summand."""

    def __init__(self, reader: WeightReader) -> None:
        reader = reader.transposed()
        self.gate_up = Linear(reader.rows("gate_proj.weight", "up_proj.weight"))
        self.down = Linear(reader.columns("down_proj.weight"))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


class Router:
    """Sigmoid routing with a correction bias and group limit ("noaux_tc"; DeepSeek-V3, section 2.1.2).

    p = sigmoid(x Wg^T), c = p + bias; keep the topk_group groups with the largest sum of their 2 best c,
    of those the K best c; weights are their p. Replicated on every rank.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        exact = accumulate_dtype(reader.dtype)
        self.weight = reader.whole("weight", exact).t().contiguous()
        self.bias = reader.whole("e_score_correction_bias", exact)
        self.num_groups = config.n_group
        self.topk_group = config.topk_group
        self.topk = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.scaling_factor = config.routed_scaling_factor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, K] int64 and their weights [T, K] in float32 (float64 in a float64 model)."""
        p = (x.to(self.weight.dtype) @ self.weight).sigmoid_()
        c = p + self.bias
        if self.topk_group < self.num_groups:
            grouped = c.view(c.shape[0], self.num_groups, -1)
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            kept = group_scores.topk(self.topk_group, dim=-1, sorted=False).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
            c = grouped.masked_fill_(dropped.unsqueeze(-1), float("-inf")).flatten(1)
        experts = c.topk(self.topk, dim=-1, sorted=False).indices
        weights = p.gather(1, experts)
        if self.normalise:
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return experts, weights.mul_(self.scaling_factor)


class MixtureOfExperts:
    """y = sum w_e E_e(x) + shared(x): returns this rank's summand.

    Every expert's width is split over ranks; with expert parallelism every rank holds whole routed experts,
    neighbours, and adds nothing for the others. The shared expert's width is always split.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        self.router = Router(config, reader.under("gate."))
        self.num_experts = config.n_routed_experts
        held, expert_reader = range(self.num_experts), reader
        if reader.expert_parallel:
            held, expert_reader = held[reader.share(self.num_experts)], reader.unsplit()
        self.first_expert = held.start
        self.experts = [SwiGluMlp(expert_reader.under(f"experts.{e}.")) for e in held]
        self.shared = SwiGluMlp(reader.under("shared_experts.")) if config.n_shared_experts else None

    def __call__(self, x: Tensor) -> Tensor:
        experts, weights = self.router(x)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        add = self._add_one_row if len(x) == 1 else self._add_sorted
        return add(out, x, experts, weights.to(x.dtype))

    def _add_one_row(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        for expert, weight in zip(experts.tolist()[0], weights.tolist()[0], strict=True):
            local = expert - self.first_expert
            if 0 <= local < len(self.experts):
                out.add_(self.experts[local](x), alpha=weight)
        return out

    def _add_sorted(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, so that each hit expert is one product over its rows.

        On the bundled checkpoint the layer takes 0.16, 0.50 and 1.35 ms for 4, 32 and 128 rows so; all
        experts over all rows take 0.20, 0.95 and 3.3 ms (AMD EPYC, one thread, both by MKL).
        """
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        begin, end = self.first_expert, self.first_expert + len(self.experts)
        before, counts = sum(counts[:begin]), counts[begin:end]
        if not any(counts):
            return out
        order = experts.flatten().argsort(stable=True)[before : before + sum(counts)]
        rows = order // experts.shape[1]
        sorted_x = x.index_select(0, rows)
        parts, start = [], 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                parts.append(expert(sorted_x[start : start + count]))
                start += count
        routed = torch.cat(parts).mul_(weights.flatten()[order].unsqueeze(-1))
        return out.index_add_(0, rows, routed)
