"""Typed access to the fields of config.json; collects what is wrong instead of stopping at the first."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from kernels_integration.errors import shown

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Legal values of config.json's torch_dtype."""

MAX_LENGTH = 2**31 - 1
"""Of a sequence: positions are counted in int32 by plans."""
_MAX_SIZE = 2**20
"""Of what has no limit of its own: many times what is released, and no product overflows."""
_MAX_MTP_LAYERS = 64


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


class FieldReader:
    """Typed access to the JSON object; collects what is wrong instead of stopping at the first."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def _missing(self, name: str, want: str) -> None:
        self.problems.append(f"{name} is missing; it must be {want}")

    def _ill_typed(self, name: str, value: object, want: str) -> None:
        self.problems.append(f"{name} is {shown(value)}; it must be {want}")

    def integer(
        self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int = _MAX_SIZE
    ) -> int:
        want = f"an integer >= {minimum}"
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self._missing(name, want)
                return minimum
            return default
        legal = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not legal:
            self._ill_typed(name, value, want)
            return minimum
        if value > maximum:
            self.problems.append(f"{name} {value} must be at most {maximum}")
            return minimum
        return int(value)

    def number(self, name: str, *, value: object = None, above: int = 0) -> float:
        """A finite number > `above`, taken from `value` where the field is nested."""
        value = self.raw.get(name) if value is None else value
        if value is None:
            self._missing(name, f"a number > {above}")
        elif not is_finite_number(value) or value <= above:
            self._ill_typed(name, value, f"a number > {above}")
        else:
            return float(value)
        return above + 1.0

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                self._missing(name, "true or false")
            return bool(default)
        if not isinstance(value, bool):
            self._ill_typed(name, value, "true or false")
        return bool(value)

    def dtype(self) -> str:
        """`torch_dtype`, spelt `dtype` by newer writers; float32 where neither is given."""
        name = "torch_dtype" if self.raw.get("torch_dtype") is not None else "dtype"
        value = self.raw.get(name)
        if value is None:
            return "float32"
        if value not in DTYPES:
            self._ill_typed(name, value, "one of " + ", ".join(DTYPES))
        return str(value)

    def first_k_dense_replace(self, num_layers: int) -> int:
        """From `first_k_dense_replace`, or from `mlp_layer_types` ("dense"..., then "sparse"...)."""
        types = self.raw.get("mlp_layer_types")
        if types is None:
            return self.integer("first_k_dense_replace", minimum=0)
        dense = types.count("dense") if isinstance(types, list) else 0
        if not isinstance(types, list) or types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            self._ill_typed("mlp_layer_types", types, 'a list of "dense" followed by "sparse"')
        elif len(types) != num_layers:
            self.problems.append(
                f"mlp_layer_types has {len(types)} entries; it must have one for each of {num_layers} layers"
            )
        given = self.raw.get("first_k_dense_replace")
        if given is not None and given != dense:
            self._ill_typed("first_k_dense_replace", given, f"{dense}, as mlp_layer_types says")
        return dense

    def n_shared_experts(self) -> int:
        """null means none; a config that does not speak of them is refused."""
        if "n_shared_experts" in self.raw and self.raw["n_shared_experts"] is None:
            return 0
        return self.integer("n_shared_experts", minimum=0, maximum=2**10)

    def num_mtp_layers(self) -> int:
        """From `num_nextn_predict_layers`, spelt `num_mtp_layers` by newer writers."""
        newer = "num_mtp_layers" if self.raw.get("num_nextn_predict_layers") is None else None
        return self.integer(
            newer or "num_nextn_predict_layers", default=0, minimum=0, maximum=_MAX_MTP_LAYERS
        )

    def indexer_types(self, num_layers: int) -> tuple[str, ...]:
        """Per layer "full" (runs its indexer) or "shared" (reuses the selection of the last full layer).

        From `indexer_types`; else `index_topk_pattern` ("FSSF"); else `index_topk_freq` (default 1) and
        `index_skip_topk_offset` (default 2): layer i is full iff max(i - offset + 1, 0) % freq == 0.
        """
        name = "indexer_types" if self.raw.get("indexer_types") is not None else "index_topk_pattern"
        given = self.raw.get(name)
        if given is None:
            freq = self.integer("index_topk_freq", default=1)
            offset = self.integer("index_skip_topk_offset", default=2, minimum=0)
            name = f"index_topk_freq {freq} with index_skip_topk_offset"
            is_full = (max(i - offset + 1, 0) % freq == 0 for i in range(num_layers))
            given = ["full" if full else "shared" for full in is_full]
            given_as: object = offset
        else:
            given_as = given
            letters = {"F": "full", "S": "shared"}
            given = (
                [letters.get(str(kind), str(kind)) for kind in given] if isinstance(given, list | str) else []
            )
        if len(given) != num_layers or not set(given) <= {"full", "shared"}:
            want = f'{num_layers} times "full" or "shared" (F or S), one for each layer'
            self._ill_typed(name, given_as, want)
        elif given[0] != "full":
            self.problems.append(
                f"{name} {shown(given_as)}: layer 0 would share a selection that no layer made"
            )
        return tuple(given)
