"""Turns a checkpoint's weights into FP8 with block scales, and back by a float64 reference."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
KEPT_HIGH = ("eh_proj", "mlp.gate.", "weights_proj", "embed_tokens", "head")


def expand(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def quantize(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values and one float32 scale per block, its greatest value at 448."""
    rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight.float().abs()
    scale = padded.view(rows, block[0], columns, block[1]).amax((1, 3)) / 448
    return (weight.float() / expand(scale, weight.shape, block)).to(torch.float8_e4m3fn), scale


def reference(stored: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Exact: 4 bits times 24 bits fit in a float64."""
    return stored.double() * expand(scale.double(), stored.shape, block)


def is_kept_high(name: str, tensor: Tensor) -> bool:
    return tensor.dim() < 2 or any(part in name for part in KEPT_HIGH)


def make_fp8(
    path: Path,
    block: tuple[int, int] = (128, 128),
    is_kept: Callable[[str, Tensor], bool] = is_kept_high,
) -> dict[str, Tensor]:
    """Rewrite the checkpoint at `path`; returns the float64 values that it now means."""
    meant, stored = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if is_kept(name, tensor):
            stored[name], meant[name] = tensor, tensor.double()
            continue
        stored[name], stored[f"{name}_scale_inv"] = quantize(tensor, block)
        meant[name] = reference(stored[name], stored[f"{name}_scale_inv"], block)
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZATION, "weight_block_size": list(block)}
    (path / "config.json").write_text(json.dumps(config))
    return meant
