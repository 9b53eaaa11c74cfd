"""One decoder layer: attention and feed-forward, each a residual step with one all-reduce."""

from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.mla import LatentAttention, PassContext
from actors.model.moe import MixtureOfExperts, SwiGluMlp
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.plan import SparseMLAPlan


class DecoderLayer:
    """Layer number `layer`, read from under `reader`'s prefix; its KV is the cache's layer of that number.

    A residual step and the norm after it are one operation, so a layer takes its input normed
    (by `input_norm`), and norms its output for whoever follows.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        reader: WeightReader,
        backend: Backend,
        tp: Collectives,
        dcp: DcpGroup,
    ) -> None:
        self.backend = backend
        self.layer = layer
        self.tp = tp
        self.eps = config.rms_norm_eps
        self.input_norm = reader.norm("input_layernorm.weight")
        self.post_attention_norm = reader.norm("post_attention_layernorm.weight")
        self.attention = LatentAttention(config, layer, reader.under("self_attn."), backend, dcp)
        self.mlp: MixtureOfExperts | SwiGluMlp
        if config.is_moe_layer(layer):
            self.mlp = MixtureOfExperts(config, reader.under("mlp."), backend)
        else:
            self.mlp = SwiGluMlp(reader.under("mlp."), backend)

    def __call__(
        self,
        h: Tensor,
        normed: Tensor,
        next_norm: Tensor,
        plan: SparseMLAPlan | None,
        ctx: PassContext,
    ) -> tuple[Tensor, SparseMLAPlan]:
        """The layer's output under next_norm, and the plan that its attention ran.

        h [T, hidden] is the residual stream, updated in place, and normed what input_norm makes of it: equal
        bits on every rank, before and after. plan: of the layer before; used where this one selects nothing.
        """
        with ctx.spans("attention"):
            try:
                out, plan = self.attention(normed, plan, ctx)
            except PlanError as error:
                raise PlanError(f"layer {self.layer}: {error}") from error
        normed = self.backend.add_rms_norm(h, self.tp.all_reduce(out), self.post_attention_norm, self.eps)
        with ctx.spans("moe"):
            out = self.mlp(normed)
        return self.backend.add_rms_norm(h, self.tp.all_reduce(out), next_norm, self.eps), plan
