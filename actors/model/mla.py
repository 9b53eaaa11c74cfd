"""Multi-head latent attention in its absorbed form, over the tokens that the indexer selects.

cq = norm(x Wqa); q = cq Wqb -> per head [q_nope | q_rope]; [c | kr] = x Wkva; c = norm(c).
q'_h = q_nope_h Wuk_h^T; score = (q'_h . c + q_rope . kr) s; out_h = (sum p c) Wuv_h.
Source: DeepSeek-V2 report, section 2.1.
T packed rows, H heads of this rank, N nope dims, R rotary dims, C latent rank, V value dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.config import ModelConfig
from actors.model.indexer import Indexer
from actors.model.joined import joined
from actors.model.rotary import halves_to_pairs
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.rows import Rows
from kernels_integration.spans import Spans
from kernels_integration.weight import Weight, accumulate_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What all layers of one forward pass share."""

    rows: Rows
    rope: Tensor
    """Of the rows' positions, as `Backend.rotary_table` makes it."""
    cache: KVCache
    is_dense: bool
    """No row sees more than index_topk tokens: one plan serves every layer, and none selects."""
    spans: Spans


class LatentAttention:
    """One layer's attention on one rank: H of the heads, over the KV that its DCP rank holds."""

    def __init__(
        self, config: ModelConfig, layer: int, reader: WeightReader, backend: Backend, dcp: DcpGroup
    ) -> None:
        self.layer = layer
        self.backend = backend
        self.dcp = dcp
        self.eps = config.rms_norm_eps
        self.scale = config.mla_scale
        self.num_heads = len(reader.topology.heads(config.num_attention_heads, reader.rank))
        self.q_lora_rank = config.q_lora_rank or 0
        self.kv_lora_rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.latent_dim = config.latent_dim
        runs_indexer = config.runs_indexer(layer)
        self.indexer = Indexer(config, reader.under("indexer."), backend) if runs_indexer else None
        has_latent = config.q_lora_rank is not None
        self.q_norm = reader.norm("q_a_layernorm.weight") if has_latent else None
        self.kv_norm = reader.norm("kv_a_layernorm.weight")
        # What multiplies x is one matrix: [Wqa | Wkva | Wk of the indexer].
        down = [reader.whole("q_a_proj.weight")] if has_latent else []
        down.append(_rotary_rows_in_pairs(reader.whole("kv_a_proj_with_mqa.weight"), 1, config))
        if self.indexer is not None:
            down.append(reader.whole("indexer.wk.weight")[self.indexer.dim_order])
        self.down_proj = backend.linear(Weight(joined(down)))
        heads = config.num_attention_heads
        query = reader.head_rows("q_b_proj.weight" if has_latent else "q_proj.weight", heads)
        self.query_proj = backend.linear(Weight(_rotary_rows_in_pairs(query, self.num_heads, config)))
        kv_b = reader.head_rows("kv_b_proj.weight", heads).view(self.num_heads, -1, config.kv_lora_rank)
        # A clone: of one head the slice is contiguous, and would keep all of kv_b.
        self.w_uk = kv_b[:, : self.nope_dim].clone(memory_format=torch.contiguous_format)  # [H, N, C]
        self.w_uv = kv_b[:, self.nope_dim :].transpose(1, 2).contiguous()  # [H, C, V]
        out_reader = reader.laid_out_for(backend)
        self.o_proj = backend.linear(out_reader.head_columns("o_proj.weight", heads))

    def __call__(
        self, x: Tensor, plan: SparseMLAPlan | None, ctx: PassContext
    ) -> tuple[Tensor, SparseMLAPlan]:
        """This rank's summand of the attention output [T, hidden], and the plan that it comes from.

        x [T, hidden] is the normed layer input; plan is that of the layer before, which serves this one too
        unless it selects for itself. Writes the rows' KV first: a row attends to itself.
        """
        down = self.down_proj(x)
        kv_end = self.q_lora_rank + self.latent_dim
        cq = x
        if self.q_norm is not None:
            cq = self.backend.rms_norm(down[:, : self.q_lora_rank], self.q_norm, self.eps)
        latents = down[:, self.q_lora_rank : kv_end]
        cache = ctx.cache.latent(self.layer)
        self.backend.write_latents(latents, self.kv_norm, self.eps, ctx.rope, cache, ctx.rows)
        if self.indexer is not None:
            self.indexer.write(down[:, kv_end:], ctx.rope, ctx.cache.index_keys(self.layer), ctx.rows)
            if not ctx.is_dense:
                plan = self._plan(x, cq, plan, ctx)
        assert plan is not None, "the first layer runs an indexer, or every pass is dense"
        q = self._absorb(self.query_proj(cq).view(x.shape[0], self.num_heads, -1), ctx.rope)
        return self._output(self._attend(plan, q, cache)), plan

    def _plan(self, x: Tensor, cq: Tensor, last: SparseMLAPlan | None, ctx: PassContext) -> SparseMLAPlan:
        assert self.indexer is not None
        keys = ctx.cache.index_keys(self.layer)
        with ctx.spans("indexer"):
            selection = self.indexer.select(x, cq, ctx.rope, keys, ctx.rows, self.dcp)
        with ctx.spans("plan"):
            return self.backend.plan(selection, like=last)

    def _absorb(self, query: Tensor, rope: Tensor) -> Tensor:
        """[q' | rotated q_rope] [T, H, C + R] from [q_nope | q_rope] [T, H, N + R]."""
        q = query.new_empty(query.shape[0], self.num_heads, self.latent_dim)
        q_nope, q_rope = query[..., : self.nope_dim], query[..., self.nope_dim :]
        self.backend.head_product(q_nope, self.w_uk, out=q[..., : self.kv_lora_rank])
        self.backend.rotate(q_rope, rope, out=q[..., self.kv_lora_rank :])
        return q

    def _attend(self, plan: SparseMLAPlan, q: Tensor, latents: StoredVectors) -> Tensor:
        """sum p c over the KV of all DCP ranks, [T, H, C]."""
        is_merged = self.dcp.size > 1
        if is_merged:
            q = self.dcp.comm.all_gather(q).transpose(0, 1).flatten(1, 2)
        dtype = self.backend.attention_dtype(q.dtype, is_merged=is_merged)
        o = q.new_empty(*q.shape[:2], self.kv_lora_rank, dtype=dtype)
        lse = q.new_empty(q.shape[:2], dtype=accumulate_dtype(q.dtype))
        self.backend.attend(plan, q, latents, o, lse, sm_scale=self.scale)
        return self.backend.merge(o, lse, self.dcp) if is_merged else o

    def _output(self, o: Tensor) -> Tensor:
        return self.o_proj(self.backend.head_product(o, self.w_uv).flatten(1))


def _rotary_rows_in_pairs(weight: Tensor, num_heads: int, config: ModelConfig) -> Tensor:
    """A projection whose last R rows of each head are rotary, reordered where the family rotates halves."""
    if config.rope_interleave:
        return weight
    heads = weight.view(num_heads, -1, weight.shape[1])
    first = heads.shape[1] - config.qk_rope_head_dim
    rotary = heads[:, first:][:, halves_to_pairs(config.qk_rope_head_dim, config.qk_rope_head_dim)]
    return joined((heads[:, :first], rotary), dim=1).flatten(0, 1)
