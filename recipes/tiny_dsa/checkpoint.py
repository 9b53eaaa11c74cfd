"""Checkpoint files in the format of DeepSeek-V3.2 on the Hugging Face hub."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from recipes.tiny_dsa.parameters import TinyConfig

INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 14_500_000
STACKED_EXPERT_NAMES = {"gate_w": "gate_proj", "up_w": "up_proj", "down_w": "down_proj"}


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def export_tensors(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors: experts apart, bfloat16, the routers' bias float32."""
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        value = param.detach().cpu()
        prefix, _, last = name.rpartition(".")
        if last in STACKED_EXPERT_NAMES:
            for expert, matrix in enumerate(value):
                tensors[f"{prefix}.{expert}.{STACKED_EXPERT_NAMES[last]}.weight"] = matrix.to(
                    torch.bfloat16
                ).contiguous()
        elif last == "e_score_correction_bias":
            tensors[name] = value.float().contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    return tensors


def hf_config(config: TinyConfig) -> dict[str, Any]:
    """What config.json holds."""
    shape = dataclasses.asdict(config)
    rope_theta = shape.pop("rope_theta")
    return {
        # GLM's name for the same layers: routers write the chats of DeepSeek-V3.2's class in a form of their
        # own, on which this model was not trained, and those of GLM's by the template. Weights are read by
        # model_type.
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "deepseek_v32",
        **shape,
        "num_key_value_heads": config.num_attention_heads,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def split_shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in their order, cut before a shard would exceed MAX_SHARD_BYTES."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + num_bytes(tensor) > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes(tensor)
    return shards


def save_checkpoint(params: Mapping[str, Tensor], config: TinyConfig, folder: Path) -> None:
    """Writes config.json, the shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = export_tensors(params)
    shards = split_shards(tensors)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file_name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {
        "metadata": {"total_size": sum(num_bytes(tensor) for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2), encoding="utf-8")


def read_weight_map(folder: Path) -> dict[str, str]:
    """File of each tensor."""
    index: dict[str, dict[str, str]] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return index["weight_map"]


def read_tensors(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors whose names begin with `prefix`, named without it."""
    for name, file_name in read_weight_map(folder).items():
        if name.startswith(prefix):
            with safe_open(folder / file_name, "pt") as shard:
                yield name.removeprefix(prefix), shard.get_tensor(name)
