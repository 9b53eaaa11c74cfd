"""Shape and parameters of the tiny checkpoint.

Parameter names are those of the Hugging Face checkpoint (DeepseekV32ForCausalLM), except that a layer's
routed experts are held stacked (`mlp.experts.gate_w/up_w/down_w`) until export.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Shape of the model; fields are named as in config.json."""

    vocab_size: int = 6144
    hidden_size: int = 256
    intermediate_size: int = 1024
    moe_intermediate_size: int = 192
    num_hidden_layers: int = 6
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    first_k_dense_replace: int = 1
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.5
    index_n_heads: int = 4
    index_head_dim: int = 64
    index_topk: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048


def init_params(config: TinyConfig, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Parameters, and the routers' correction biases as plain tensors (they are not trained by gradient)."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def draw(name: str, *shape: int, std: float | None = None) -> None:
        std = std if std is not None else 1.0 / math.sqrt(shape[-1])
        tensors[name] = torch.randn(*shape, generator=generator) * std

    def draw_output(name: str, *shape: int, fan_in: int) -> None:
        """A projection that adds to the residual stream: smaller, the more layers there are."""
        draw(name, *shape, std=0.5 / math.sqrt(fan_in * num_layers))

    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    experts, expert_width = config.n_routed_experts, config.moe_intermediate_size
    shared_width = expert_width * config.n_shared_experts
    num_layers = config.num_hidden_layers
    draw("model.embed_tokens.weight", config.vocab_size, hidden, std=0.02)
    draw("lm_head.weight", config.vocab_size, hidden, std=0.02)
    tensors["model.norm.weight"] = torch.ones(hidden)
    for i in range(num_layers + config.num_nextn_predict_layers):
        layer = f"model.layers.{i}."
        attn = layer + "self_attn."
        mlp = layer + "mlp."
        tensors[layer + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = torch.ones(hidden)
        draw(attn + "q_a_proj.weight", config.q_lora_rank, hidden)
        tensors[attn + "q_a_layernorm.weight"] = torch.ones(config.q_lora_rank)
        draw(attn + "q_b_proj.weight", heads * (nope + rope), config.q_lora_rank)
        draw(attn + "kv_a_proj_with_mqa.weight", config.kv_lora_rank + rope, hidden)
        tensors[attn + "kv_a_layernorm.weight"] = torch.ones(config.kv_lora_rank)
        draw(attn + "kv_b_proj.weight", heads * (nope + v_dim), config.kv_lora_rank)
        draw_output(attn + "o_proj.weight", hidden, heads * v_dim, fan_in=heads * v_dim)
        draw(attn + "indexer.wq_b.weight", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        draw(attn + "indexer.wk.weight", config.index_head_dim, hidden)
        tensors[attn + "indexer.k_norm.weight"] = torch.ones(config.index_head_dim)
        tensors[attn + "indexer.k_norm.bias"] = torch.zeros(config.index_head_dim)
        draw(attn + "indexer.weights_proj.weight", config.index_n_heads, hidden)
        if i < config.first_k_dense_replace:
            dense_width = config.intermediate_size
            draw(mlp + "gate_proj.weight", dense_width, hidden)
            draw(mlp + "up_proj.weight", dense_width, hidden)
            draw_output(mlp + "down_proj.weight", hidden, dense_width, fan_in=dense_width)
        else:
            draw(mlp + "gate.weight", experts, hidden)
            tensors[mlp + "gate.e_score_correction_bias"] = torch.zeros(experts)
            draw(mlp + "experts.gate_w", experts, expert_width, hidden)
            draw(mlp + "experts.up_w", experts, expert_width, hidden)
            draw_output(mlp + "experts.down_w", experts, hidden, expert_width, fan_in=expert_width)
            draw(mlp + "shared_experts.gate_proj.weight", shared_width, hidden)
            draw(mlp + "shared_experts.up_proj.weight", shared_width, hidden)
            draw_output(mlp + "shared_experts.down_proj.weight", hidden, shared_width, fan_in=shared_width)
        if i >= num_layers:
            tensors[layer + "enorm.weight"] = torch.ones(hidden)
            tensors[layer + "hnorm.weight"] = torch.ones(hidden)
            draw(layer + "eh_proj.weight", hidden, 2 * hidden)
            tensors[layer + "shared_head.norm.weight"] = torch.ones(hidden)
    return {
        name: tensor.to(device) if name.endswith("correction_bias") else torch.nn.Parameter(tensor.to(device))
        for name, tensor in tensors.items()
    }


class LayerWeights(NamedTuple):
    """Views of one layer's parameters under short names; the norm before each sub-layer is called "ln"."""

    attention: dict[str, Tensor]
    mlp: dict[str, Tensor]
    mtp: dict[str, Tensor]


def layer_weights(params: Mapping[str, Tensor], config: TinyConfig) -> list[LayerWeights]:
    """One entry a layer; the last is the MTP layer."""

    def under(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in params.items()
            if name.startswith(prefix)
        }

    layers = []
    for i in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        layer = under(f"model.layers.{i}.")
        attention, mlp = under(f"model.layers.{i}.self_attn."), under(f"model.layers.{i}.mlp.")
        attention["ln"], mlp["ln"] = layer["input_layernorm"], layer["post_attention_layernorm"]
        mtp: dict[str, Tensor] = {
            name: layer[name] for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm") if name in layer
        }
        layers.append(LayerWeights(attention, mlp, mtp))
    return layers
