"""Experts that one tensor holds, as transformers stacks them, under the released name of each expert.

E experts, I their width: experts.gate_up_proj [E, 2I, hidden] (gate first), experts.down_proj
[E, hidden, I]; FP8 scales under the same names with _scale_inv.
"""

import dataclasses
import re
from collections.abc import Iterator

from actors.model.quantization import SCALE_SUFFIX
from actors.model.safetensors_file import TensorInfo

_STACKED = re.compile(rf"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)({SCALE_SUFFIX})?")
_SINGLE = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_MAX_EXPERTS = 2**16
"""Of a layer. A header may claim any number of experts without a byte of data."""


def stacked_name(name: str) -> str | None:
    """The tensor in which the weight of an expert may be stacked; None for other tensors."""
    match = _SINGLE.fullmatch(name)
    return None if match is None else f"{match[1]}.{'down' if match[2] == 'down' else 'gate_up'}_proj"


def by_expert(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """The released tensors that a stored tensor holds: its experts' where it is stacked, else itself."""
    match = _STACKED.fullmatch(name)
    is_stack = match is not None and len(info.shape) == 3 and info.shape[0] <= _MAX_EXPERTS
    if match is None or not is_stack or (match[2] == "gate_up_proj" and info.shape[1] % 2):
        yield name, info
        return
    prefix, kind, suffix = match[1], match[2], match[3] or ""
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    num_experts, rows, columns = info.shape
    shape = (rows // len(parts), columns)
    one = dataclasses.replace(info, shape=shape, stored_as=name)
    for index in range(num_experts * len(parts)):
        expert, part = divmod(index, len(parts))
        yield (
            f"{prefix}.{expert}.{parts[part]}.weight{suffix}",
            dataclasses.replace(one, offset=info.offset + index * one.num_bytes),
        )
