"""Training model of the tiny DSA + MTP checkpoint: plain torch functions over a flat dict of parameters.

Attention is computed in full with a mask: the sparsity of DSA is real in its arithmetic, not in its cost.

Dimensions: B sequences, S window, H hidden, A attention heads, I indexer heads, D indexer head dim,
E experts, V vocabulary. The residual stream is float32, matrix products are bfloat16.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny_dsa.parameters import TinyConfig, layer_weights

BF16 = torch.bfloat16
# Score of a key that must not be seen.
MASKED = -1e9

# flash: dense, no indexer; dense: dense, and the indexer learns; sparse: top-k, and the indexer learns on the
# chosen set; sparse_eval: top-k alone.
AttentionMode = Literal["flash", "dense", "sparse", "sparse_eval"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(BF16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(BF16))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(linear(x, gate)) * linear(x, up)


def rope_tables(
    config: TinyConfig, window: int, device: torch.device, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, rope / 2] of positions offset .. offset + window - 1."""
    dim = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, dim, 2, device=device).float() / dim)
    angles = (torch.arange(window, device=device).float() + offset)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring elements (main attention). x [B, S, heads, rope]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(BF16)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates element i with element i + rope / 2 (indexer). x [B, S, heads, rope]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF16)


class Keys(NamedTuple):
    """What a layer keeps of its tokens: k [B, A, S, nope + rope], v [B, A, S, v], index [B, S, D]."""

    k: Tensor
    v: Tensor
    index: Tensor | None


class IndexQuery(NamedTuple):
    """The indexer's queries [B, I, S, D] and their weights [B, I, S]."""

    q: Tensor
    weights: Tensor


def project_index(
    h: Tensor, q_latent: Tensor, weights: Mapping[str, Tensor], cos: Tensor, sin: Tensor, config: TinyConfig
) -> tuple[IndexQuery, Tensor]:
    """Queries and keys [B, S, D] of the indexer, which learns alone: its inputs are detached."""
    batch, window, _ = h.shape
    heads, dim, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    h, q_latent = h.detach(), q_latent.detach()
    q = linear(q_latent, weights["indexer.wq_b"]).view(batch, window, heads, dim)
    q = torch.cat([rotate_halves(q[..., :rope], cos, sin), q[..., rope:]], -1).transpose(1, 2)
    key = F.layer_norm(
        linear(h, weights["indexer.wk"]).float(),
        (dim,),
        weights["indexer.k_norm"],
        weights["indexer.k_norm.bias"],
        1e-6,
    ).to(BF16)
    rotated = rotate_halves(key[..., :rope].unsqueeze(2), cos, sin).squeeze(2)
    key = torch.cat([rotated, key[..., rope:]], -1)
    head_weights = linear(h, weights["indexer.weights_proj"]).float() * (heads**-0.5 * dim**-0.5)
    return IndexQuery(q, head_weights.transpose(1, 2)), key


def masked_attention(
    q: Tensor,
    index_query: IndexQuery,
    keys: Keys,
    chain: Sequence[Keys],
    mode: AttentionMode,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of q [B, A, S, nope + rope] over `keys` and, for MTP steps after the first, over the
    one key of each step in `chain` that belongs to the query. Returns out [B, A, S, v] and the indexer's KL.
    """
    window = q.shape[2]
    products = torch.matmul(index_query.q, keys.index.transpose(-1, -2).unsqueeze(1))
    index_scores = (F.relu(products).float() * index_query.weights.unsqueeze(-1)).sum(1)  # [B, S, S]
    causal = torch.ones(window, window, dtype=torch.bool, device=q.device).tril()
    index_scores = torch.where(causal, index_scores, MASKED)
    chain_index_scores = [  # [B, S] each
        (F.relu((index_query.q * step.index.unsqueeze(1)).float().sum(-1)) * index_query.weights).sum(1)
        for step in chain
    ]
    visible, chain_visible = causal, None
    if mode.startswith("sparse"):
        all_scores = index_scores.detach()
        if chain:
            all_scores = torch.cat(
                [index_scores] + [scores.unsqueeze(-1) for scores in chain_index_scores], -1
            ).detach()
        chosen = torch.zeros(all_scores.shape, dtype=torch.bool, device=q.device)
        top = all_scores.topk(min(topk, all_scores.shape[-1]), -1, sorted=False).indices
        chosen = chosen.scatter(-1, top, True)
        visible = chosen[..., :window] & causal
        chain_visible = chosen[..., window:]

    head_visible = visible.unsqueeze(1) if mode.startswith("sparse") else visible
    scores = torch.matmul(q, keys.k.transpose(-1, -2)).float() * scale
    scores = torch.where(head_visible, scores, MASKED)
    lse = torch.logsumexp(scores, -1)
    chain_scores = []
    for i, step in enumerate(chain):
        step_scores = (q * step.k).float().sum(-1) * scale
        if chain_visible is not None:
            step_scores = torch.where(chain_visible[..., i].unsqueeze(1), step_scores, MASKED)
        chain_scores.append(step_scores)
        lse = torch.logaddexp(lse, step_scores)
    probs = torch.exp(scores - lse.unsqueeze(-1))
    out = torch.matmul(probs.to(BF16), keys.v)
    for step_scores, step in zip(chain_scores, chain, strict=True):
        out = out + (torch.exp(step_scores - lse).unsqueeze(-1) * step.v).to(BF16)
    if mode == "sparse_eval" or chain:
        return out, None
    target = probs.detach().mean(1)
    index_logprobs = torch.where(visible, index_scores, MASKED)
    index_logprobs = index_logprobs - torch.logsumexp(index_logprobs, -1, keepdim=True)
    return out, (target * (torch.log(target + 1e-9) - index_logprobs)).sum(-1).mean()


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    config: TinyConfig,
    mode: AttentionMode,
    topk: int,
    first_keys: Keys | None = None,
    chain: tuple[Keys, ...] = (),
) -> tuple[Tensor, Keys, Tensor | None]:
    """One attention sub-layer over the residual stream x [B, S, H] float32.

    An MTP step after the first attends over `first_keys` (the first step's, all positions) and over the
    entries of its own chain: `chain` holds the steps between, one entry a query. Returns x + attention,
    this step's keys, and the indexer's KL divergence from the head-averaged attention, or None.
    """
    batch, window, _ = x.shape
    heads = config.num_attention_heads
    nope, rope, v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    h = rms_norm(x, weights["ln"])
    q_latent = rms_norm(linear(h, weights["q_a_proj"]), weights["q_a_layernorm"])
    q = linear(q_latent, weights["q_b_proj"]).view(batch, window, heads, nope + rope)
    q = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:], cos, sin)], -1).transpose(1, 2)
    kv_latent, k_rope = linear(h, weights["kv_a_proj_with_mqa"]).split([config.kv_lora_rank, rope], -1)
    kv = linear(rms_norm(kv_latent, weights["kv_a_layernorm"]), weights["kv_b_proj"])
    kv = kv.view(batch, window, heads, nope + v_dim)
    k_rope = rotate_pairs(k_rope.unsqueeze(2), cos, sin).expand(batch, window, heads, rope)
    k = torch.cat([kv[..., :nope], k_rope], -1).transpose(1, 2)
    v = kv[..., nope:].transpose(1, 2)
    scale = (nope + rope) ** -0.5
    if mode == "flash":
        # the fused kernel wants v as wide as k
        padded_v = F.pad(v, (0, nope + rope - v_dim))
        out = F.scaled_dot_product_attention(q, k, padded_v, is_causal=True, scale=scale)[..., :v_dim]
        keys, kl = Keys(k, v, None), None
    else:
        index_query, index_key = project_index(h, q_latent, weights, cos, sin, config)
        keys = Keys(k, v, index_key)
        if first_keys is None:
            out, kl = masked_attention(q, index_query, keys, (), mode, topk, scale)
        else:
            out, kl = masked_attention(q, index_query, first_keys, (*chain, keys), mode, topk, scale)
    out = linear(out.transpose(1, 2).reshape(batch, window, heads * v_dim), weights["o_proj"])
    return x + out, keys, kl


def dense_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    h = rms_norm(x, weights["ln"])
    return x + linear(swiglu(h, weights["gate_proj"], weights["up_proj"]), weights["down_proj"])


def moe(x: Tensor, weights: Mapping[str, Tensor], config: TinyConfig) -> tuple[Tensor, Tensor]:
    """Group-limited routing without auxiliary loss; returns x + experts and the tokens of each expert [E].

    All experts are computed and weighted (zero where not routed): at this size that beats gathering.
    """
    batch, window, hidden = x.shape
    num_experts, num_groups = config.n_routed_experts, config.n_group
    group_size = num_experts // num_groups
    h = rms_norm(x, weights["ln"]).view(batch * window, hidden)
    scores = torch.sigmoid(h.float() @ weights["gate"].float().t())
    with torch.no_grad():
        # the bias decides who is chosen, never the weight of the chosen
        biased = scores + weights["gate.e_score_correction_bias"]
        group_scores = biased.view(-1, num_groups, group_size).topk(2, -1).values.sum(-1)
        top_groups = group_scores.topk(config.topk_group, -1).indices
        in_group = torch.zeros_like(group_scores).scatter(1, top_groups, 1.0)
        biased = torch.where(in_group.repeat_interleave(group_size, 1) > 0, biased, float("-inf"))
        top_experts = biased.topk(config.num_experts_per_tok, -1).indices
        routed = torch.zeros_like(scores).scatter(1, top_experts, 1.0)
    gates = scores * routed
    gates = gates / (gates.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    expert_width = weights["experts.gate_w"].shape[1]
    inner = swiglu(h, weights["experts.gate_w"].flatten(0, 1), weights["experts.up_w"].flatten(0, 1))
    inner = inner.view(-1, num_experts, expert_width) * gates.unsqueeze(-1).to(BF16)
    down = weights["experts.down_w"].transpose(0, 1).reshape(hidden, num_experts * expert_width)
    routed_out = linear(inner.view(-1, num_experts * expert_width), down)
    shared_out = linear(
        swiglu(h, weights["shared_experts.gate_proj"], weights["shared_experts.up_proj"]),
        weights["shared_experts.down_proj"],
    )
    return x + (routed_out + shared_out).view(batch, window, hidden), routed.sum(0)


def mtp_input(h: Tensor, embedding: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Embedding first, hidden state second, as in the released checkpoints."""
    joined = torch.cat([rms_norm(embedding, weights["enorm"]), rms_norm(h, weights["hnorm"])], -1)
    return linear(joined, weights["eh_proj"]).float()


class BlockOutput(NamedTuple):
    x: Tensor
    keys: Keys
    kl: Tensor | None
    expert_load: Tensor | None


class ForwardOutput(NamedTuple):
    """hidden: what the head reads, [B, S, H] bfloat16, one entry a step; KL terms of the layers that have
    one; tokens routed to each expert [E] by layer."""

    hidden: list[Tensor]
    kl: list[Tensor]
    expert_loads: dict[int, Tensor]


class TinyDsa:
    """The main model and its MTP layer over one dict of parameters."""

    def __init__(self, config: TinyConfig, params: dict[str, Tensor], *, compiled: bool = False) -> None:
        self.config, self.params = config, params
        self.device = params["lm_head.weight"].device
        self.layers = layer_weights(params, config)
        self._attention, self._dense_mlp, self._moe = attention, dense_mlp, moe
        if compiled:
            self._attention, self._dense_mlp, self._moe = (
                torch.compile(function, dynamic=False) for function in (attention, dense_mlp, moe)
            )
        self._rope: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def rope(self, window: int, offset: int = 0) -> tuple[Tensor, Tensor]:
        if (window, offset) not in self._rope:
            self._rope[window, offset] = rope_tables(self.config, window, self.device, offset)
        return self._rope[window, offset]

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.params["model.embed_tokens.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] bfloat16 of head inputs [..., H]."""
        return hidden @ self.params["lm_head.weight"].to(BF16).t()

    def block(
        self,
        layer: int,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mode: AttentionMode,
        topk: int,
        first_keys: Keys | None = None,
        chain: tuple[Keys, ...] = (),
    ) -> BlockOutput:
        weights = self.layers[layer]
        x, keys, kl = self._attention(x, weights.attention, *rope, self.config, mode, topk, first_keys, chain)
        if "gate" in weights.mlp:
            x, expert_load = self._moe(x, weights.mlp, self.config)
            return BlockOutput(x, keys, kl, expert_load)
        return BlockOutput(self._dense_mlp(x, weights.mlp), keys, kl, None)

    def main(self, token_ids: Tensor, mode: AttentionMode, topk: int) -> ForwardOutput:
        """The main model over token_ids [B, S]; one hidden state, after the final norm."""
        rope = self.rope(token_ids.shape[1])
        x = self.embed(token_ids)
        kl, expert_loads = [], {}
        for layer in range(self.config.num_hidden_layers):
            out = self.block(layer, x, rope, mode, topk)
            x = out.x
            if out.kl is not None:
                kl.append(out.kl)
            if out.expert_load is not None:
                expert_loads[layer] = out.expert_load
        return ForwardOutput([rms_norm(x, self.params["model.norm.weight"])], kl, expert_loads)

    def mtp(
        self,
        h: Tensor,
        token_ids: Tensor,
        steps: int,
        mode: AttentionMode,
        topk: int,
        *,
        chain_normed: bool = True,
    ) -> ForwardOutput:
        """The one MTP layer applied `steps` times, from the main model's h [B, S, H].

        token_ids [B, S + steps] is the sequence itself: step j at index i reads token i + j and predicts
        token i + j + 1. The next step reads the state after shared_head.norm, or before
        it if not `chain_normed`.
        KL and expert load are those of the first step.
        """
        layer, window = self.config.num_hidden_layers, h.shape[1]
        weights = self.layers[layer].mtp
        first: BlockOutput | None = None
        chain: tuple[Keys, ...] = ()
        hidden = []
        for j in range(1, steps + 1):
            x = mtp_input(h, self.embed(token_ids[:, j : j + window]), weights)
            first_keys = None if first is None else first.keys
            out = self.block(layer, x, self.rope(window, j - 1), mode, topk, first_keys, chain)
            normed = rms_norm(out.x, weights["shared_head.norm"])
            hidden.append(normed)
            h = normed if chain_normed else out.x
            if first is None:
                first = out
            else:
                chain = (*chain, out.keys)
        assert first is not None, "at least one step"
        assert first.expert_load is not None, "the MTP layer is a mixture of experts"
        return ForwardOutput(hidden, [] if first.kl is None else [first.kl], {layer: first.expert_load})
