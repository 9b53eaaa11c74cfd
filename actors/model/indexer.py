"""The lightning indexer of DeepSeek sparse attention: which tokens each row attends to.

I(t, s) = sum_h w_h(t) relu(q_h(t) . k(s) * D^-1/2), top index_topk (DeepSeek-V3.2 report, section 2.1).
Replicated on every rank, with equal shapes, so that all ranks select alike.
T packed rows, H index heads, D index head dim, R rotary dims.
"""

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.rotary import halves_to_pairs
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.rows import Rows, Selection
from kernels_integration.weight import Weight, accumulate_dtype

KEY_NORM_EPS = 1e-6


class Indexer:
    """One layer's indexer. Its owner computes x Wk, in one product with the projections of MLA."""

    def __init__(self, config: ModelConfig, reader: WeightReader, backend: Backend) -> None:
        self.backend = backend
        self.num_heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rotary_dim = config.qk_rope_head_dim
        self.topk = config.index_topk
        exact = accumulate_dtype(reader.dtype)
        # Scaled once here instead of every w: H^-1/2 belongs to w in the paper's formula.
        # In place: `*` on the meta tensors of the slice meter imports torch._dynamo, which takes seconds and
        # leaves a folder behind.
        scaled = reader.whole("weights_proj.weight", exact).clone().mul_(self.num_heads**-0.5)
        self.weights_proj = backend.linear(Weight(scaled))
        halves = not config.indexer_rope_interleave
        order = halves_to_pairs(self.head_dim, self.rotary_dim) if halves else torch.arange(self.head_dim)
        self.dim_order = order
        self.k_norm_weight = reader.norm("k_norm.weight")[order]
        self.k_norm_bias = reader.norm("k_norm.bias")[order]
        wq_b = reader.whole("wq_b.weight").view(self.num_heads, self.head_dim, -1)
        self.wq_b = backend.linear(Weight(wq_b[:, order].flatten(0, 1)))

    def write(self, keys: Tensor, rope: Tensor, cache: StoredVectors, rows: Rows) -> None:
        """Store k of x Wk [T, D]: normed, its first R dims rotated."""
        self.backend.write_index_keys(
            keys, self.k_norm_weight, self.k_norm_bias, KEY_NORM_EPS, rope, cache, rows
        )

    def select(
        self, x: Tensor, cq: Tensor, rope: Tensor, cache: StoredVectors, rows: Rows, dcp: DcpGroup
    ) -> Selection:
        """The top-k of each row from the layer input x [T, hidden], its latent cq and the cached keys."""
        query = self.wq_b(cq).view(x.shape[0], self.num_heads, self.head_dim)
        self.backend.rotate(query[..., : self.rotary_dim], rope)
        weights = self.weights_proj(x)
        return self.backend.select_topk(query, weights, cache, rows, self.topk, dcp)
