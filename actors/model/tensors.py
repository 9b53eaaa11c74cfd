"""The tensors of a checkpoint by their released names, with their shapes; nothing here reads a file."""

import re
from dataclasses import dataclass
from typing import TypeAlias

from actors.model.config import ModelConfig

Shapes: TypeAlias = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, None for those of the whole model."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def main_tensor_shapes(config: ModelConfig) -> Shapes:
    """What the main model cannot do without."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        shapes |= _decoder_layer_shapes(config, layer)
    return shapes


def mtp_tensor_shapes(config: ModelConfig, num_mtp_layers: int | None = None) -> Shapes:
    """What the first MTP layers (None: all) need: each is a whole decoder layer and its entrance."""
    shapes: Shapes = {}
    h = config.hidden_size
    num_mtp_layers = config.num_mtp_layers if num_mtp_layers is None else num_mtp_layers
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + num_mtp_layers):
        prefix = layer_prefix(layer)
        shapes |= {
            f"{prefix}enorm.weight": (h,),
            f"{prefix}hnorm.weight": (h,),
            f"{prefix}eh_proj.weight": (h, 2 * h),
            f"{prefix}shared_head.norm.weight": (h,),
        }
        shapes |= _decoder_layer_shapes(config, layer)
    return shapes


def repeated_tensors(config: ModelConfig, num_mtp_layers: int | None = None) -> dict[str, str]:
    """Tensors that a release may repeat, each with the one that is used in its place and must be equal.

    The head where it is tied; embedding and head inside the first MTP layers (None: all).
    """
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    copies = {HEAD: EMBEDDING} if config.tie_word_embeddings else {}
    num_mtp_layers = config.num_mtp_layers if num_mtp_layers is None else num_mtp_layers
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + num_mtp_layers):
        copies[f"{layer_prefix(layer)}embed_tokens.weight"] = EMBEDDING
        copies[f"{layer_prefix(layer)}shared_head.head.weight"] = head
    return copies


def repeated_tensor_shapes(config: ModelConfig) -> Shapes:
    """What a release may hold beside the model: copies, and rotary frequencies, which follow from the config.

    Neither is used.
    """
    shapes: Shapes = dict.fromkeys(repeated_tensors(config), (config.vocab_size, config.hidden_size))
    for layer in range(config.num_hidden_layers + config.num_mtp_layers):
        inv_freq = f"{layer_prefix(layer)}self_attn.rotary_emb.inv_freq"
        shapes[inv_freq] = (config.qk_rope_head_dim // 2,)
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    main: int
    mtp: int
    active: int
    """Of the main model, those that one token meets: all but the experts it is not sent to."""


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    main = _num_elements(main_tensor_shapes(config))
    num_moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = (config.n_routed_experts - config.num_experts_per_tok) * expert * num_moe_layers
    return ParameterCounts(main=main, mtp=_num_elements(mtp_tensor_shapes(config)), active=main - idle)


def _num_elements(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def _decoder_layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    prefix, h = layer_prefix(layer), config.hidden_size
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (h,),
        f"{prefix}post_attention_layernorm.weight": (h,),
    }
    shapes |= _attention_shapes(config, f"{prefix}self_attn.")
    if config.runs_indexer(layer):
        shapes |= _indexer_shapes(config, f"{prefix}self_attn.indexer.")
    if not config.is_moe_layer(layer):
        return shapes | _mlp_shapes(f"{prefix}mlp.", h, config.intermediate_size)
    experts = config.n_routed_experts
    shapes[f"{prefix}mlp.gate.weight"] = (experts, h)
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", h, config.moe_intermediate_size)
    if config.n_shared_experts:
        width = config.n_shared_experts * config.moe_intermediate_size
        shapes |= _mlp_shapes(f"{prefix}mlp.shared_experts.", h, width)
    return shapes


def _attention_shapes(config: ModelConfig, prefix: str) -> Shapes:
    h, heads = config.hidden_size, config.num_attention_heads
    kv_b_width = config.qk_nope_head_dim + config.v_head_dim
    return _query_shapes(config, prefix) | {
        f"{prefix}kv_a_proj_with_mqa.weight": (config.latent_dim, h),
        f"{prefix}kv_a_layernorm.weight": (config.kv_lora_rank,),
        f"{prefix}kv_b_proj.weight": (heads * kv_b_width, config.kv_lora_rank),
        f"{prefix}o_proj.weight": (h, heads * config.v_head_dim),
    }


def _query_shapes(config: ModelConfig, prefix: str) -> Shapes:
    h, width, rank = config.hidden_size, config.num_attention_heads * config.qk_head_dim, config.q_lora_rank
    if rank is None:
        return {f"{prefix}q_proj.weight": (width, h)}
    return {
        f"{prefix}q_a_proj.weight": (rank, h),
        f"{prefix}q_a_layernorm.weight": (rank,),
        f"{prefix}q_b_proj.weight": (width, rank),
    }


def _indexer_shapes(config: ModelConfig, prefix: str) -> Shapes:
    h, heads, dim = config.hidden_size, config.index_n_heads, config.index_head_dim
    assert config.q_lora_rank is not None, "a model with an indexer has a query latent"
    return {
        f"{prefix}wq_b.weight": (heads * dim, config.q_lora_rank),
        f"{prefix}wk.weight": (dim, h),
        f"{prefix}k_norm.weight": (dim,),
        f"{prefix}k_norm.bias": (dim,),
        f"{prefix}weights_proj.weight": (heads, h),
    }


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
