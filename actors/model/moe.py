"""The feed-forward part of a layer: a dense MLP, or routed and shared experts.

T packed rows, E experts of this rank, K experts per token, I the width of an expert on this rank.
"""

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend, Routing
from kernels_integration.weight import accumulate_dtype


class SwiGluMlp:
    """down(silu(gate x) * up x), its width split over ranks: returns this rank's summand."""

    def __init__(self, reader: WeightReader, backend: Backend) -> None:
        reader = reader.laid_out_for(backend)
        self.backend = backend
        self.gate_up = backend.linear(reader.rows("gate_proj.weight", "up_proj.weight"))
        self.down = backend.linear(reader.columns("down_proj.weight"))

    def __call__(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]"""
        return self.down(self.backend.swiglu(self.gate_up(x)))


class MixtureOfExperts:
    """y = sum w_e E_e(x) + shared(x): returns this rank's summand.

    Every expert's width is split over ranks; with expert parallelism every rank holds whole routed experts,
    neighbours, and adds nothing for the others. The shared expert's width is always split. The router is
    replicated on every rank.
    """

    def __init__(self, config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
        self.backend = backend
        exact = accumulate_dtype(reader.dtype)
        self.router_weight = reader.laid_out_for(backend).whole("gate.weight", exact)
        self.router_bias = reader.whole("gate.e_score_correction_bias", exact)
        self.routing = Routing(
            topk=config.num_experts_per_tok,
            num_groups=config.n_group,
            topk_group=config.topk_group,
            normalise=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
        held = reader.topology.experts(config.n_routed_experts, reader.rank)
        expert_reader = reader.laid_out_for(backend)
        if reader.topology.expert_parallel:
            expert_reader = expert_reader.unsplit()
        self.experts = backend.experts(
            expert_reader.expert_rows(held, "gate_proj.weight", "up_proj.weight"),
            expert_reader.expert_columns(held, "down_proj.weight"),
            first_expert=held.start,
            num_experts=config.n_routed_experts,
        )
        has_shared = bool(config.n_shared_experts)
        self.shared = SwiGluMlp(reader.under("shared_experts."), backend) if has_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        experts, weights = self.backend.route(x, self.router_weight, self.router_bias, self.routing)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        return self.experts(x, experts, weights, out)
