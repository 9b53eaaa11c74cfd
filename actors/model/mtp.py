"""A multi-token-prediction module (DeepSeek-V3 report, section 2.2): it looks one token further."""

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.decoder import DecoderLayer
from actors.model.mla import PassContext
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.weight import Weight


class MtpLayer:
    """z = shared_head.norm(layer(eh_proj([enorm(embedding) | hnorm(h)]))).

    The row of slot p takes t[p] and h[p-1], and predicts t[p+1]; of several, module j takes z[p-1] of module
    j-1 in place of h[p-1]. Module j is layer num_hidden_layers + j of checkpoint and cache.
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
        self.eps = config.rms_norm_eps
        self.embedding_norm = reader.norm("enorm.weight")
        self.hidden_norm = reader.norm("hnorm.weight")
        self.eh_proj = backend.linear(Weight(reader.laid_out_for(backend).whole("eh_proj.weight")))
        self.layer = DecoderLayer(config, layer, reader, backend, tp, dcp)
        self.head_norm = reader.norm("shared_head.norm.weight")

    def __call__(
        self, embedding: Tensor, prev_hidden: Tensor, plan: SparseMLAPlan | None, ctx: PassContext
    ) -> Tensor:
        """embedding and prev_hidden [T, hidden] -> z [T, hidden].

        plan: of dense attention; None: the layer selects.
        """
        norm = self.backend.rms_norm
        entrance = torch.cat(
            (norm(embedding, self.embedding_norm, self.eps), norm(prev_hidden, self.hidden_norm, self.eps)),
            dim=-1,
        )
        h = self.eh_proj(entrance)
        z, _ = self.layer(h, norm(h, self.layer.input_norm, self.eps), self.head_norm, plan, ctx)
        return z
