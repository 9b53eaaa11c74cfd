"""One decoder layer: attention and feed-forward, each a residual step with one all-reduce."""

from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.layers import rms_norm
from actors.model.mla import LatentAttention, PassContext
from actors.model.moe import MixtureOfExperts, SwiGluMlp
from actors.model.weights import WeightReader
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup


class DecoderLayer:
    """Layer number `layer`, read from under `reader`'s prefix; its KV is the cache's layer of that number."""

    def __init__(
        self, config: ModelConfig, layer: int, reader: WeightReader, tp: Collectives, dcp: DcpGroup
    ) -> None:
        self.tp = tp
        self.eps = config.rms_norm_eps
        self.input_norm = reader.norm("input_layernorm.weight")
        self.post_attention_norm = reader.norm("post_attention_layernorm.weight")
        self.attention = LatentAttention(config, layer, reader.under("self_attn."), dcp)
        self.mlp: MixtureOfExperts | SwiGluMlp
        if config.is_moe_layer(layer):
            self.mlp = MixtureOfExperts(config, reader.under("mlp."))
        else:
            self.mlp = SwiGluMlp(reader.under("mlp."))

    def __call__(self, h: Tensor, ctx: PassContext) -> Tensor:
        """h [T, hidden], overwritten; equal bits on every rank, before and after."""
        with ctx.spans("attention"):
            out = self.attention(rms_norm(h, self.input_norm, self.eps), ctx)
        h += self.tp.all_reduce(out)
        with ctx.spans("moe"):
            out = self.mlp(rms_norm(h, self.post_attention_norm, self.eps))
        h += self.tp.all_reduce(out)
        return h
