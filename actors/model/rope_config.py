"""What config.json says about rotary embeddings: theta, and YaRN where the context was extended.

Two spellings: `rope_theta` beside `rope_scaling`, and `rope_parameters`, which holds both.
Source: YaRN paper; `_compute_yarn_parameters` and `yarn_apply_mscale` of transformers 5.24.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.model.config_fields import MAX_LENGTH, FieldReader, is_finite_number
from actors.model.known_fields import ROPE_FIELDS, ROPE_NEUTRAL, refuse_unknown_within
from kernels_integration.errors import shown

DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies divided by `factor`, but for dimensions that turn often within the original length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    """Dimensions with more turns than this keep their frequency."""
    beta_slow: float
    """Dimensions with fewer turns than this are interpolated in full."""
    truncate: bool
    """The ramp between the two begins and ends at whole dimensions."""
    embedding_factor: float
    """Multiplies cos and sin."""
    score_factor: float
    """Multiplies the scale of the attention scores."""


def read_rope(read: FieldReader, max_position_embeddings: int) -> tuple[float, YarnScaling | None]:
    """theta and the scaling, None for plain rotary embeddings. Problems go to `read`."""
    nested = _nested(read)
    theta = read.number("rope_theta", value=nested.get("rope_theta"), above=1)
    kind = nested.get("rope_type", nested.get("type"))
    if kind is None:
        unread = sorted(set(nested) - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
        if unread:
            read.problems.append(
                f"the rotary embedding has {', '.join(unread)} but no rope_type that tells what they mean; "
                "supported: 'default', 'yarn'"
            )
        return theta, None
    if kind == "default":
        plain = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
        refuse_unknown_within("the plain rotary embedding", nested, plain, read.problems)
        return theta, None
    if kind != "yarn":
        read.problems.append(f"rope type {shown(kind)} is not supported; supported: 'default', 'yarn'")
        return theta, None
    asking = {name: value for name, value in nested.items() if ROPE_NEUTRAL.get(name) != value}
    refuse_unknown_within("yarn", asking, ROPE_FIELDS, read.problems)
    return theta, _yarn(read, nested, max_position_embeddings)


def mscale(factor: float, weight: float) -> float:
    """m(f, a) = 0.1 a ln f + 1; 1 without an extension."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _nested(read: FieldReader) -> Mapping[str, Any]:
    """`rope_scaling` or `rope_parameters`, whichever is given; empty when neither is."""
    given = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = read.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            read.problems.append(f"{name} is {shown(value)}; it must be null or a JSON object")
        elif value:
            given[name] = value
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        read.problems.append("rope_scaling and rope_parameters say different things; keep one of them")
    found: Mapping[str, Any] = next(iter(given.values()), {})
    partial = found.get("partial_rotary_factor", read.raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        read.problems.append(f"partial_rotary_factor {shown(partial)} is not supported; supported: 1")
    return found


def _yarn(read: FieldReader, nested: Mapping[str, Any], max_position_embeddings: int) -> YarnScaling:
    def number(name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        value = nested.get(name)
        if value is None and default is not None:
            return default
        if not is_finite_number(value) or value < minimum:
            read.problems.append(f"yarn's {name} is {shown(value)}; it must be a number >= {minimum:g}")
            return 1.0
        return float(value)

    factor = number("factor", minimum=1.0)
    # A length beside the rope's own fields goes first, as in transformers.
    original = read.raw.get("original_max_position_embeddings")
    if original is None:
        original = nested.get("original_max_position_embeddings", max_position_embeddings)
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        read.problems.append(
            f"yarn's original_max_position_embeddings is {shown(original)}; it must be an integer >= 1"
        )
        original = 1
    if original * factor > MAX_LENGTH:
        read.problems.append(
            f"yarn's factor {factor:g} times original_max_position_embeddings {original} must be at most "
            f"{MAX_LENGTH}"
        )
        factor = 1.0
    weight, weight_all = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    embedding = mscale(factor, 1.0)
    if weight and weight_all:
        embedding = mscale(factor, weight) / mscale(factor, weight_all)
    truncate = nested.get("truncate", True)
    if not isinstance(truncate, bool):
        read.problems.append(f"yarn's truncate is {shown(truncate)}; it must be true or false")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number("beta_fast", 0.0) or DEFAULT_BETA_FAST,
        beta_slow=number("beta_slow", 0.0) or DEFAULT_BETA_SLOW,
        truncate=bool(truncate),
        embedding_factor=number("attention_factor", embedding),
        score_factor=mscale(factor, weight_all) ** 2,
    )
