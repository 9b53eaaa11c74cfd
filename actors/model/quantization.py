"""Which quantised checkpoints are read: what config.json and the names of tensors say. No torch.

Supported is FP8 as DeepSeek and GLM release it: X.weight in float8_e4m3fn, and X.weight_scale_inv with one
scale per block of the weight. Which tensors are so stored is told by the scales alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from actors.model.known_fields import QUANTIZATION_FIELDS, refuse_unknown_within
from kernels_integration.errors import shown

DEFAULT_BLOCK_SIZE = (128, 128)
SCALE_SUFFIX = "_scale_inv"
SUPPORTED = (
    'supported: bfloat16, float16, float32, and FP8 with quant_method "fp8", fmt "e4m3" and a '
    "weight_block_size such as [128, 128]"
)

_PACKED_SUFFIXES = {
    ".qweight": "packed integers (AWQ or GPTQ)",
    ".qzeros": "packed integers (AWQ or GPTQ)",
    ".scales": "packed integers (AWQ or GPTQ)",
    ".g_idx": "packed integers (GPTQ)",
    ".weight_packed": "packed integers (compressed-tensors)",
    ".weight_shape": "packed integers (compressed-tensors)",
    ".weight_zero_point": "integers (compressed-tensors)",
    ".weight_g_idx": "packed integers (compressed-tensors)",
    ".weight_scale": "a weight with one scale per tensor, channel or group (compressed-tensors)",
    ".weight_scale_2": "NVFP4 (ModelOpt)",
    ".input_scale": "static scales of activations",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
}
_KV_SCALE_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_output_scale")


def read_block_size(raw: Mapping[str, Any], problems: list[str]) -> tuple[int, int]:
    """[rows, columns] of the weight that share a scale, from config.json `raw`; problems are appended."""
    config = raw.get("quantization_config", raw.get("compression_config"))
    if config is None:
        return DEFAULT_BLOCK_SIZE
    if not isinstance(config, Mapping):
        problems.append(f"quantization_config is {shown(config)}; it must be an object; {SUPPORTED}")
        return DEFAULT_BLOCK_SIZE
    method = config.get("quant_method")
    if method != "fp8":
        problems.append(
            f"quantization_config of quant_method {shown(method)}{_details(config)} is not supported; "
            f"{SUPPORTED}"
        )
        return DEFAULT_BLOCK_SIZE
    for name, legal in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if config.get(name, legal) != legal:
            problems.append(
                f"quantization_config.{name} {shown(config[name])} is not supported; it must be {legal!r}"
            )
    refuse_unknown_within("quantization_config", config, QUANTIZATION_FIELDS, problems)
    size = config.get("weight_block_size")
    if not _is_pair_of_counts(size):
        problems.append(
            f"quantization_config.weight_block_size is {shown(size)}; it must be two integers >= 1, such as "
            f"[128, 128]: FP8 with one scale per tensor or channel is not supported; {SUPPORTED}"
        )
        return DEFAULT_BLOCK_SIZE
    return size[0], size[1]


def _is_pair_of_counts(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)


def _details(config: Mapping[str, Any]) -> str:
    """The words by which a user knows the variant: bits and formats."""
    told = [
        f"{name} {shown(config[name])}"
        for name in ("bits", "w_bit", "format", "quant_algo")
        if name in config
    ]
    return f" ({', '.join(told)})" if told else ""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is the calibrated scale of an FP8 KV cache. No weight depends on it, and a cache in
    fp8_ds_mla computes its scales from the values."""
    return name.endswith(_KV_SCALE_SUFFIXES)


def packed_stem(name: str) -> str | None:
    """X where `name` is X.qweight or another part of a packed weight, else None."""
    for suffix in _PACKED_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return None


def describe_packed(names: Iterable[str]) -> str | None:
    """One line about the tensors among `names` that belong to formats that are not read; None without any."""
    packed = [name for name in names if packed_stem(name) is not None]
    if not packed:
        return None
    kinds = sorted({text for suffix, text in _PACKED_SUFFIXES.items() for n in packed if n.endswith(suffix)})
    return f"{len(packed)} tensors such as {packed[0]} hold {' and '.join(kinds)}; {SUPPORTED}"
