"""What keeps the tensors of a checkpoint from being the model that its config describes, line by line."""

from collections.abc import Iterable, Mapping

from actors.model.checkpoint_files import CheckpointFiles
from actors.model.quantization import SCALE_SUFFIX, describe_packed, packed_stem
from actors.model.safetensors_file import TensorInfo
from actors.model.stacked_experts import stacked_name
from actors.model.tensors import layer_of

READABLE_DTYPES = ("BF16", "F16", "F32", "F64")
FP8_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


def find_problems(
    files: CheckpointFiles,
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    block_size: tuple[int, int],
) -> list[str]:
    """One line for each tensor that is missing, unexpected, of a wrong shape or dtype, or of a format that
    is not read."""
    tensors, expected = files.tensors, {**optional, **required}
    problems = _missing(files, required)
    unexpected: list[str] = []
    for name, info in tensors.items():
        if name in expected:
            problems += _misfits(name, info, expected[name], tensors, block_size)
        elif name.removesuffix(SCALE_SUFFIX) not in expected:
            unexpected.append(name)
    unannounced = _unannounced_layers(unexpected, expected)
    if unannounced:
        problems.append(_describe_unannounced(unannounced))
        unexpected = [name for name in unexpected if name not in unannounced]
    packed = describe_packed(unexpected)
    if packed is not None:
        problems.append(packed)
    problems += [
        f"unexpected  {name}, shape {list(tensors[name].shape)} in {tensors[name].file}"
        for name in unexpected
        if packed_stem(name) is None
    ]
    return problems


def _unannounced_layers(unexpected: Iterable[str], expected: Iterable[str]) -> dict[str, int]:
    """Tensors of layers behind the last one that config.json speaks of, and their layers."""
    last = max((layer for name in expected if (layer := layer_of(name)) is not None), default=-1)
    layers = {name: layer for name in unexpected if (layer := layer_of(name)) is not None}
    return {name: layer for name, layer in layers.items() if layer > last}


def _describe_unannounced(found: Mapping[str, int]) -> str:
    layers = sorted(set(found.values()))
    name = next(iter(found))
    shown = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    is_mtp = any(".eh_proj." in tensor for tensor in found)
    way_out = (
        f"these are MTP modules: raise num_nextn_predict_layers by {len(layers)} there, or delete them"
        if is_mtp
        else "correct num_hidden_layers there, or delete them"
    )
    return (
        f"unexpected  {len(found)} tensors of {shown}, such as {name}, which config.json does not announce; "
        f"{way_out}"
    )


def _missing(files: CheckpointFiles, required: Mapping[str, tuple[int, ...]]) -> list[str]:
    packed = {packed_stem(name) for name in files.tensors}
    absent = [
        name
        for name in required
        if name not in files.tensors
        and name.removesuffix(".weight") not in packed
        and name not in files.reported
        and stacked_name(name) not in files.reported
    ]
    if absent and files.has_unknown_tensors:
        return [f"missing     {len(absent)} tensors, unless the files that cannot be read hold them"]
    return [f"missing     {name}, shape {list(required[name])}" for name in absent]


def _misfits(
    name: str,
    info: TensorInfo,
    shape: tuple[int, ...],
    tensors: Mapping[str, TensorInfo],
    block_size: tuple[int, int],
) -> list[str]:
    if info.shape != shape:
        return [f"wrong shape {name}: {list(info.shape)} in {info.file}, must be {list(shape)}"]
    scale = tensors.get(f"{name}{SCALE_SUFFIX}")
    if info.dtype == FP8_DTYPE and len(shape) == 2:
        if scale is None:
            return [f"wrong dtype {name}: {FP8_DTYPE} in {info.file} without {name}{SCALE_SUFFIX}"]
        return _scale_misfits(name, info, scale, block_size)
    if info.dtype not in READABLE_DTYPES:
        legal = ", ".join(READABLE_DTYPES)
        more = f", or {FP8_DTYPE} with scales" if len(shape) == 2 else ""
        return [f"wrong dtype {name}: {info.dtype} in {info.file}, must be one of {legal}{more}"]
    if scale is not None:
        return [f"unexpected  {name}{SCALE_SUFFIX} in {scale.file}: {name} is {info.dtype}, not {FP8_DTYPE}"]
    return []


def _scale_misfits(name: str, info: TensorInfo, scale: TensorInfo, block_size: tuple[int, int]) -> list[str]:
    rows, columns = block_size
    shape = (-(-info.shape[0] // rows), -(-info.shape[1] // columns))
    if scale.shape != shape:
        return [
            f"wrong shape {name}{SCALE_SUFFIX}: {list(scale.shape)} in {scale.file}, must be {list(shape)}: "
            f"one scale for each {rows}x{columns} block of {list(info.shape)}"
        ]
    if scale.dtype not in SCALE_DTYPES:
        legal = ", ".join(SCALE_DTYPES)
        return [f"wrong dtype {name}{SCALE_SUFFIX}: {scale.dtype} in {scale.file}, must be one of {legal}"]
    if info.stored_as is not None and info.stored_as.endswith("gate_up_proj") and info.shape[0] % rows:
        return [
            f"{info.stored_as} in {info.file}: no FP8 block of {rows} rows ends where gate and up of an "
            f"expert meet, at row {info.shape[0]}; store the experts one by one"
        ]
    return []
