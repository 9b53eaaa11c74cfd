"""Small random checkpoints in the released format, for shapes that the bundled one does not have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from actors.model.config import ModelConfig
from actors.model.tensors import Shapes, main_tensor_shapes, mtp_tensor_shapes

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 16,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}


def random_tensors(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            tensors[name] = 0.1 * noise
        elif len(shape) == 1:
            tensors[name] = 1 + 0.1 * noise
        elif "embed_tokens" in name:
            tensors[name] = noise
        else:
            tensors[name] = noise * (1.5 if "q_b" in name else 1.0) * shape[1] ** -0.5
    return tensors


def write_random_checkpoint(directory: Path, overrides: dict[str, Any] | None = None) -> Path:
    """config.json and one file of weights; `overrides` changes fields, None removes one."""
    raw = {**BASE_CONFIG, **(overrides or {})}
    config = ModelConfig.from_dict(raw)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(main_tensor_shapes(config) | mtp_tensor_shapes(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
