"""Tiny random checkpoints of every family, written out by the tensor names of the releases.

Names and shapes stand here once more, apart from `actors.model.tensors`: transformers reads the same files,
so a name that is wrong would show.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")

_COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 70,
    "moe_intermediate_size": 22,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
_INDEX: dict[str, Any] = {"index_n_heads": 5, "index_head_dim": 20, "index_topk": 16}
_DEEPSEEK: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None}
_GLM: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_interleave": True,
}
_BASES = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**_DEEPSEEK, **_INDEX}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**_GLM, **_INDEX}),
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How the random weights are drawn."""

    seed: int = 0
    residual_scale: float = 1.0
    """Of what writes into the residual stream."""
    mtp_align: float = 0.0
    """1: an MTP module passes its embedding on; with a small residual scale, drafts then agree often."""
    logit_scale: float = 2.0


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A config.json of the family; `overrides` change fields, and None writes null."""
    architecture, base = _BASES[family]
    return {"architectures": [architecture], "model_type": family, **_COMMON, **base, **overrides}


def write_tiny_model(directory: Path, family: str, weights: Weights | None = None, **overrides: Any) -> Path:
    """A checkpoint of the family in `directory`, in two files with an index."""
    config = tiny_config(family, **overrides)
    tensors = _Tensors(config, weights or Weights()).draw()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def full_layers(config: dict[str, Any]) -> list[bool]:
    """Per main layer whether it runs an indexer, from any of GLM's spellings."""
    num_layers = config["num_hidden_layers"]
    if config["model_type"] == "deepseek_v3":
        return [False] * num_layers
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return [kind in ("full", "F") for kind in kinds]
    freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    return [max(i - offset + 1, 0) % freq == 0 for i in range(num_layers)]


class _Tensors:
    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.generator = torch.Generator().manual_seed(weights.seed)
        self.tensors: dict[str, Tensor] = {}

    def draw(self) -> dict[str, Tensor]:
        c = self.config
        vocab, h, num_layers = c["vocab_size"], c["hidden_size"], c["num_hidden_layers"]
        self.tensors["model.embed_tokens.weight"] = self._noise(vocab, h)
        for i, is_full in enumerate(full_layers(c)):
            self._layer(f"model.layers.{i}.", is_dense=i < c["first_k_dense_replace"], has_indexer=is_full)
        self._norm("model.norm.weight", h)
        if not c["tie_word_embeddings"]:
            self._linear("lm_head.weight", vocab, h, self.weights.logit_scale)
        for k in range(c["num_nextn_predict_layers"]):
            prefix = f"model.layers.{num_layers + k}."
            for name in ("enorm", "hnorm", "shared_head.norm"):
                self._norm(f"{prefix}{name}.weight", h)
            align = self.weights.mtp_align
            self._linear(f"{prefix}eh_proj.weight", h, 2 * h, 1 - align)
            self.tensors[f"{prefix}eh_proj.weight"] += align * torch.eye(h, 2 * h)
            self._layer(prefix, is_dense=False, has_indexer=c["model_type"] != "deepseek_v3")
        return self.tensors

    def _layer(self, prefix: str, *, is_dense: bool, has_indexer: bool) -> None:
        c = self.config
        h, heads = c["hidden_size"], c["num_attention_heads"]
        self._norm(f"{prefix}input_layernorm.weight", h)
        self._norm(f"{prefix}post_attention_layernorm.weight", h)
        attention = f"{prefix}self_attn."
        query_width = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        if c["q_lora_rank"] is None:
            self._linear(f"{attention}q_proj.weight", query_width, h, 1.5)
        else:
            self._linear(f"{attention}q_a_proj.weight", c["q_lora_rank"], h)
            self._norm(f"{attention}q_a_layernorm.weight", c["q_lora_rank"])
            self._linear(f"{attention}q_b_proj.weight", query_width, c["q_lora_rank"], 1.5)
        latent = c["kv_lora_rank"]
        self._linear(f"{attention}kv_a_proj_with_mqa.weight", latent + c["qk_rope_head_dim"], h)
        self._norm(f"{attention}kv_a_layernorm.weight", latent)
        self._linear(
            f"{attention}kv_b_proj.weight", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent
        )
        scale = self.weights.residual_scale
        self._linear(f"{attention}o_proj.weight", h, heads * c["v_head_dim"], 2 * scale)
        if has_indexer:
            self._indexer(f"{attention}indexer.")
        if is_dense:
            self._mlp(f"{prefix}mlp.", c["intermediate_size"])
            return
        num_experts = c["n_routed_experts"]
        self._linear(f"{prefix}mlp.gate.weight", num_experts, h)
        self.tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = 0.1 * self._noise(num_experts)
        for e in range(num_experts):
            self._mlp(f"{prefix}mlp.experts.{e}.", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            self._mlp(f"{prefix}mlp.shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])

    def _indexer(self, prefix: str) -> None:
        c = self.config
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        self._linear(f"{prefix}wq_b.weight", heads * dim, c["q_lora_rank"])
        self._linear(f"{prefix}wk.weight", dim, c["hidden_size"])
        self._norm(f"{prefix}k_norm.weight", dim)
        self.tensors[f"{prefix}k_norm.bias"] = 0.1 * self._noise(dim)
        self._linear(f"{prefix}weights_proj.weight", heads, c["hidden_size"])

    def _mlp(self, prefix: str, width: int) -> None:
        h = self.config["hidden_size"]
        self._linear(f"{prefix}gate_proj.weight", width, h)
        self._linear(f"{prefix}up_proj.weight", width, h)
        self._linear(f"{prefix}down_proj.weight", h, width, 1.7 * self.weights.residual_scale)

    def _norm(self, name: str, size: int) -> None:
        self.tensors[name] = 1 + 0.1 * self._noise(size)

    def _linear(self, name: str, out_features: int, in_features: int, scale: float = 1.0) -> None:
        self.tensors[name] = self._noise(out_features, in_features) * (scale * in_features**-0.5)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)
