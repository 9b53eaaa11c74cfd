"""Settings of dynamic k: static tables in vLLM's shape, and what is said of mistakes."""

from typing import Any

import pytest

from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve
from kernels_integration.errors import ConfigError


def load(given: dict[str, Any]) -> EngineArgs:
    return load_settings(EngineArgs, given, spelling="flag", environ={}).args


TABLE = "[[9,64,1],[1,8,3],[65,512,0]]"
ROWS = ((1, 8, 3), (9, 64, 1), (65, 512, 0))
CONFIG = f'{{"method":"mtp","num_speculative_tokens":3,"num_speculative_tokens_per_batch_size":{TABLE}}}'


@pytest.mark.parametrize(
    "given",
    [
        {"num_speculative_tokens_per_batch_size": TABLE, "num_speculative_tokens": "3"},
        {"speculative_config": CONFIG},
    ],
)
def test_a_table_in_either_spelling(given: dict[str, Any]) -> None:
    group = resolve(load(given))
    assert (group.num_speculative_tokens, group.num_speculative_tokens_per_batch_size) == (3, ROWS)


def test_a_table_by_keyword() -> None:
    assert EngineArgs(speculative_config=CONFIG).num_speculative_tokens_per_batch_size == ROWS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "table",
    ["[]", "[[2,8,3]]", "[[1,8,3],[8,9,1]]", "[[1,8,9]]", "[[5,1,0]]", "[[1,8]]", "[[1,8,-1]]", "x", "3"],
)
def test_a_bad_table_is_told(table: str) -> None:
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens-per-batch-size is .*from 1, not"):
        load({"num_speculative_tokens_per_batch_size": table})


def test_a_table_above_the_ceiling_is_told() -> None:
    given = {"num_speculative_tokens_per_batch_size": "[[1,8,3]]", "num_speculative_tokens": "2"}
    with pytest.raises(ConfigError, match=r"gives 1 to 8 requests 3 drafts.*allows 2"):
        resolve(load(given))


def test_dynamic_speculation_and_trace_reach_the_group() -> None:
    group = resolve(load({"trace": "t.json", "dynamic_speculative_decoding": "true"}))
    assert (group.dynamic_speculative_decoding, group.trace) == (True, True)
    assert not resolve(load({})).trace
