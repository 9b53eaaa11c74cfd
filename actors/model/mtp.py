"""A multi-token-prediction module (DeepSeek-V3 report, section 2.2): it looks one token further."""

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.decoder import DecoderLayer
from actors.model.layers import rms_norm
from actors.model.linear import Linear
from actors.model.mla import PassContext
from actors.model.weights import WeightReader
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup


class MtpLayer:
    """z = shared_head.norm(layer(eh_proj([enorm(embedding) | hnorm(h)]))).

    The row of slot p takes t[p] and h[p-1], and predicts t[p+1]; of several, module j takes z[p-1] of module
    j-1 in place of h[p-1]. Module j is layer num_hidden_layers + j of checkpoint and cache.
    """

    def __init__(
        self, config: ModelConfig, layer: int, reader: WeightReader, tp: Collectives, dcp: DcpGroup
    ) -> None:
        self.eps = config.rms_norm_eps
        self.embedding_norm = reader.norm("enorm.weight")
        self.hidden_norm = reader.norm("hnorm.weight")
        self.eh_proj = Linear(reader.transposed().whole("eh_proj.weight"))
        self.layer = DecoderLayer(config, layer, reader, tp, dcp)
        self.head_norm = reader.norm("shared_head.norm.weight")

    def __call__(self, embedding: Tensor, prev_hidden: Tensor, ctx: PassContext) -> Tensor:
        """embedding and prev_hidden [T, hidden] -> z [T, hidden]."""
        entrance = torch.cat(
            (
                rms_norm(embedding, self.embedding_norm, self.eps),
                rms_norm(prev_hidden, self.hidden_norm, self.eps),
            ),
            dim=-1,
        )
        return rms_norm(self.layer(self.eh_proj(entrance), ctx), self.head_norm, self.eps)
