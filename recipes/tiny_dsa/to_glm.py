"""The same weights in GLM's dialect (`glm_moe_dsa`): identical outputs, other code path.

    python -m recipes.tiny_dsa.to_glm CHECKPOINT OUT

GLM's indexer rotates interleaved pairs where DeepSeek-V3.2's rotates halves; permuting the rotary rows of the
indexer's wq_b, wk and k_norm turns one into the other exactly. Everything else is shared.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.tiny_dsa.checkpoint import INDEX_FILE, read_weight_map

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX_FILE)


def rotary_permutation(head_dim: int, rope_dim: int) -> Tensor:
    """Old row of each new row: new row 2i is old row i, new row 2i + 1 is old row i + rope_dim / 2."""
    order = torch.arange(head_dim)
    half = rope_dim // 2
    order[0:rope_dim:2] = torch.arange(half)
    order[1:rope_dim:2] = torch.arange(half) + half
    return order


def convert_tensor(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The tensor with its rotary rows permuted, if it is one of the indexer's."""
    head_dim = config["index_head_dim"]
    order = rotary_permutation(head_dim, config["qk_rope_head_dim"])
    if name.endswith("indexer.wq_b.weight"):
        per_head = tensor.view(config["index_n_heads"], head_dim, -1)
        return per_head[:, order].reshape(tensor.shape).contiguous()
    if ".indexer.wk." in name or ".indexer.k_norm." in name:
        return tensor[order].contiguous()
    return tensor


def convert_config(config: dict[str, Any]) -> dict[str, Any]:
    """GLM's config.json of the same model."""
    shared = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return {
        **shared,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full"] * config["num_hidden_layers"],
        "rope_parameters": {"rope_theta": config["rope_theta"], "rope_type": "default"},
    }


def convert(source: Path, target: Path) -> None:
    """Writes the checkpoint `source` to the folder `target`, shard by shard."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for file_name in sorted(set(read_weight_map(source).values())):
        tensors = {
            name: convert_tensor(name, tensor, config)
            for name, tensor in load_file(source / file_name).items()
        }
        save_file(tensors, target / file_name, metadata={"format": "pt"})
    glm_config = json.dumps(convert_config(config), indent=2)
    (target / "config.json").write_text(glm_config, encoding="utf-8")
    for file_name in COPIED_FILES:
        shutil.copy(source / file_name, target / file_name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="CHECKPOINT")
    parser.add_argument("target", type=Path, metavar="OUT")
    args = parser.parse_args()
    convert(args.source, args.target)


if __name__ == "__main__":
    main()
