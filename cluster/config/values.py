"""Types of settings: what text or typed value is legal, and the rule in words.

Values come as text (flags, environment) or typed (file, keywords); both are parsed here.
"""

import itertools
import json
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cluster.config.setting import Rule
from cluster.config.sizes import SIZE_PATTERN, parse_size

MAX_SPECULATIVE_TOKENS = 8
MAX_COUNT = 65536
"""Of a block's tokens, and of requests that run together: beyond any machine."""


def _whole_number(value: Any) -> Any:
    """Text and ints go on to pydantic; true and 4.0 are no counts."""
    if isinstance(value, bool | float):
        raise ValueError("not a whole number")
    return value


# Bounds stand inside, so that the JSON schema shows them.
Count = Annotated[int, Field(ge=1), BeforeValidator(_whole_number), Rule("a whole number >= 1")]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_whole_number), Rule("a whole number >= 0")]
CountOrAll = Annotated[
    int, Field(ge=-1), BeforeValidator(_whole_number), Rule("a whole number >= 0, or -1 for all")
]
SmallCount = Annotated[
    int,
    Field(ge=1, le=MAX_COUNT),
    BeforeValidator(_whole_number),
    Rule(f"a whole number from 1 to {MAX_COUNT}"),
]
NumDrafts = Annotated[
    int,
    Field(ge=0, le=MAX_SPECULATIVE_TOKENS),
    BeforeValidator(_whole_number),
    Rule(f"a whole number from 0 to {MAX_SPECULATIVE_TOKENS}"),
]
GatewayCount = Annotated[
    SmallCount | None,
    BeforeValidator(lambda value: None if value == "per-node" else value),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"enum": ["per-node", None]}]}
    ),
    Rule(f"a whole number from 1 to {MAX_COUNT}, or per-node"),
]
ThreadCount = Annotated[
    SmallCount | None,
    BeforeValidator(lambda value: None if value == "auto" else value),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"enum": ["auto", None]}]}
    ),
    Rule(f"a whole number from 1 to {MAX_COUNT}, or auto"),
]
Seed = Annotated[
    int,
    Field(ge=0, lt=2**64),
    BeforeValidator(_whole_number),
    Rule("a whole number from 0 to 2**64 - 1"),
]
Port = Annotated[
    int,
    Field(ge=0, le=65535),
    BeforeValidator(_whole_number),
    Rule("a whole number from 0 to 65535", "PORT"),
]
PortOrNone = Annotated[
    Port | None,
    BeforeValidator(lambda value: None if value == "none" else value),
    Rule("a whole number from 0 to 65535, or none", "PORT"),
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Rule("a number of seconds above 0", "SECONDS")]
Share = Annotated[float, Field(gt=0, le=1), Rule("a share above 0 and at most 1", "SHARE")]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
    Rule("a size of at least one byte, such as 512M or 2G", "SIZE"),
]
FilePath = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, PathLike) else value),
    Field(min_length=1),
]
Text = Annotated[str, Field(min_length=1)]
DType = Literal["auto", "float32", "float64", "bfloat16"]
KVCacheDtype = Literal["auto", "float32", "float64", "bfloat16", "fp8_ds_mla"]
IndexerKVDtype = Literal["auto", "float32", "float64", "bfloat16", "fp8"]


def parse_json(value: Any) -> Any:
    """A flag or a variable holds JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _ascending(table: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """vLLM's rules: ranges in any order, not overlapping, the first from 1; gaps take the row before."""
    rows = tuple(sorted(table))
    if any(first > last for first, last, _ in rows) or not rows or rows[0][0] != 1:
        raise ValueError("not ranges from 1")
    if any(row[1] >= following[0] for row, following in itertools.pairwise(rows)):
        raise ValueError("overlapping ranges")
    return rows


DraftTable = Annotated[
    tuple[tuple[Count, Count, NumDrafts], ...],
    AfterValidator(_ascending),
    Rule(
        "JSON rows of first and last number of requests and drafts, such as [[1,8,3],[9,64,1],[65,512,0]]: "
        "from 1, not overlapping",
        "JSON",
    ),
]


class SpeculativeConfig(BaseModel):
    """The value of --speculative-config, vLLM's spelling of --num-speculative-tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: NumDrafts
    num_speculative_tokens_per_batch_size: DraftTable | None = None
