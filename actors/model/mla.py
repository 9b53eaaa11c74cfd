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
from actors.model.layers import halves_to_pairs, rms_norm, rotate_pairs
from actors.model.linear import Linear
from actors.model.weights import WeightReader, accumulate_dtype
from kernels_integration import attention
from kernels_integration.dcp import DcpGroup, merge_attention
from kernels_integration.kv_cache import KVCache
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.planner import StepPlanner
from kernels_integration.rows import RowBatch
from kernels_integration.selection import Selection
from kernels_integration.spans import Spans


@dataclass(slots=True, kw_only=True)
class PassContext:
    """What all layers of one forward pass share, and the selection that one layer hands to the next."""

    rows: RowBatch
    rope: Tensor
    """[T, R/2] complex, of the rows' positions."""
    cache: KVCache
    planner: StepPlanner
    dense_plan: SparseMLAPlan | None
    """The plan of every layer when no row sees more than index_topk tokens; else layers select."""
    spans: Spans
    selection: Selection | None = None
    """Of the last layer that ran its indexer; layers that share one reuse it."""


class LatentAttention:
    """One layer's attention on one rank: H of the heads, over the KV that its DCP rank holds."""

    def __init__(self, config: ModelConfig, layer: int, reader: WeightReader, dcp: DcpGroup) -> None:
        self.layer = layer
        self.dcp = dcp
        self.eps = config.rms_norm_eps
        self.scale = config.mla_scale
        self.num_heads = -(-config.num_attention_heads // reader.size)
        self.q_lora_rank = config.q_lora_rank or 0
        self.kv_lora_rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.latent_dim = config.latent_dim
        self.indexer = Indexer(config, reader.under("indexer.")) if config.runs_indexer(layer) else None
        has_latent = config.q_lora_rank is not None
        self.q_norm = reader.norm("q_a_layernorm.weight") if has_latent else None
        self.kv_norm = reader.norm("kv_a_layernorm.weight")
        # What multiplies x is one matrix: [Wqa | Wkva | Wk of the indexer].
        down = [reader.whole("q_a_proj.weight")] if has_latent else []
        down.append(_rotary_rows_in_pairs(reader.whole("kv_a_proj_with_mqa.weight"), 1, config))
        if self.indexer is not None:
            down.append(reader.whole("indexer.wk.weight")[self.indexer.dim_order])
        self.down_proj = Linear(torch.cat(down))
        heads = config.num_attention_heads
        query = reader.head_rows("q_b_proj.weight" if has_latent else "q_proj.weight", heads)
        self.query_proj = Linear(_rotary_rows_in_pairs(query, self.num_heads, config))
        kv_b = reader.head_rows("kv_b_proj.weight", heads).view(self.num_heads, -1, config.kv_lora_rank)
        self.w_uk = kv_b[:, : self.nope_dim].contiguous()  # [H, N, C]
        self.w_uv = kv_b[:, self.nope_dim :].transpose(1, 2).contiguous()  # [H, C, V]
        self.o_proj = Linear(reader.transposed().head_columns("o_proj.weight", heads))

    def __call__(self, x: Tensor, ctx: PassContext) -> Tensor:
        """This rank's summand of the attention output [T, hidden]; x [T, hidden] is the normed layer input.

        Writes the rows' KV first: a row attends to itself.
        """
        down = self.down_proj(x)
        kv_end = self.q_lora_rank + self.latent_dim
        cq = rms_norm(down[:, : self.q_lora_rank], self.q_norm, self.eps) if self.q_norm is not None else x
        latent = down[:, self.q_lora_rank : kv_end]
        c = latent[:, : self.kv_lora_rank]
        c.copy_(rms_norm(c, self.kv_norm, self.eps))
        rotate_pairs(latent[:, self.kv_lora_rank :], ctx.rope)
        index_key = self.indexer.key(down[:, kv_end:], ctx.rope) if self.indexer is not None else None
        ctx.cache.write(self.layer, ctx.rows, latent, index_key)

        plan = ctx.dense_plan if ctx.dense_plan is not None else self._sparse_plan(x, cq, ctx)
        q = self._absorb(self.query_proj(cq).view(x.shape[0], self.num_heads, -1), ctx.rope)
        return self._output(self._attend(plan, q, ctx.cache.latent(self.layer)))

    def _sparse_plan(self, x: Tensor, cq: Tensor, ctx: PassContext) -> SparseMLAPlan:
        if self.indexer is not None:
            keys = ctx.cache.index_keys(self.layer)
            with ctx.spans("indexer"):
                ctx.selection = self.indexer.select(x, cq, ctx.rope, keys, ctx.rows, self.dcp)
        assert ctx.selection is not None, "the first layer runs an indexer, or every pass is dense"
        with ctx.spans("plan"):
            return ctx.planner.plan(ctx.selection)

    def _absorb(self, query: Tensor, rope: Tensor) -> Tensor:
        """[q' | rotated q_rope] [T, H, C + R] from [q_nope | q_rope] [T, H, N + R]."""
        q = query.new_empty(query.shape[0], self.num_heads, self.latent_dim)
        q_nope, q_rope = query[..., : self.nope_dim], query[..., self.nope_dim :]
        q[..., : self.kv_lora_rank] = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        rotate_pairs(q_rope, rope, out=q[..., self.kv_lora_rank :])
        return q

    def _attend(self, plan: SparseMLAPlan, q: Tensor, latents: StoredVectors) -> Tensor:
        """sum p c over the KV of all DCP ranks, [T, H, C]."""
        if self.dcp.size > 1:
            q = self.dcp.comm.all_gather(q).transpose(0, 1).flatten(1, 2)
        exact = accumulate_dtype(q.dtype)
        o = torch.empty(*q.shape[:2], self.kv_lora_rank, dtype=exact)
        lse = torch.empty(q.shape[:2], dtype=exact)
        attention.run(plan, q, latents, o, lse, sm_scale=self.scale)
        return merge_attention(o, lse, self.dcp) if self.dcp.size > 1 else o

    def _output(self, o: Tensor) -> Tensor:
        values = torch.bmm(o.to(self.w_uv.dtype).transpose(0, 1), self.w_uv)
        return self.o_proj(values.transpose(0, 1).flatten(1))


def _rotary_rows_in_pairs(weight: Tensor, num_heads: int, config: ModelConfig) -> Tensor:
    """A projection whose last R rows of each head are rotary, reordered where the family rotates halves."""
    if config.rope_interleave:
        return weight
    heads = weight.view(num_heads, -1, weight.shape[1])
    first = heads.shape[1] - config.qk_rope_head_dim
    rotary = heads[:, first:][:, halves_to_pairs(config.qk_rope_head_dim, config.qk_rope_head_dim)]
    return torch.cat((heads[:, :first], rotary), dim=1).flatten(0, 1)
