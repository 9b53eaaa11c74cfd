"""What a request may ask for: the edges of each parameter, and the words that refuse what lies beyond."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import actors
from actors.coordinator.sampling_spec import sampling_spec
from actors.messages import SamplingSpec
from actors.parameter_kinds import Texts, TokenIds, TokenValues
from actors.requests import Request
from actors.sampling_params import PARAMETERS, SamplingParams, ShardParams
from actors.structured_outputs import StructuredOutputs
from kernels_integration.errors import MAX_SHOWN, InvalidRequestError, shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop", b"x"),
        ("stop", [5]),
        ("stop", ["\ud800"]),
        ("bad_words", 5),
        ("bad_words", ["\udfff"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "12"),
        pytest.param("logit_bias", {"9" * 5000: 1}, id="logit_bias-10**5000"),
        ("top_k", 2**63),
        ("max_tokens", 2**63),
        ("min_tokens", 2**63),
        pytest.param("top_k", 10**5000, id="top_k-10**5000"),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", None),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 0.0099),
        ("repetition_penalty", float("nan")),
        ("top_p", 0),
        ("detokenize", None),
        ("logit_bias", [1]),
        ("logit_bias", {1: True}),
        ("logit_bias", {True: 1}),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", {"1": 1}),
        ("n", 129),
        ("bad_words", ["a" * 1024] * 33),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} (is|holds) .*; it must be ") as caught:
        SamplingParams(**{"max_tokens": None, field: value})
    assert caught.value.field == field


def test_the_largest_counts_fit_messages_and_arrays() -> None:
    largest = SamplingParams(top_k=2**63 - 1, max_tokens=2**63 - 1, min_tokens=2**63 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(largest), type=SamplingParams) == largest
    assert np.array([largest.top_k]).dtype == np.int64


def test_the_smallest_repetition_penalty_overflows_no_logit() -> None:
    penalty = np.float32(SamplingParams(repetition_penalty=0.01).repetition_penalty)
    assert np.isfinite(np.float32(1e30) / penalty)


def test_a_long_value_does_not_hide_the_rule() -> None:
    with pytest.raises(InvalidRequestError, match="at most 16 non-empty strings") as caught:
        SamplingParams(stop=tuple(f"s{i}" for i in range(100_000)))
    assert len(str(caught.value)) < 2 * MAX_SHOWN
    assert shown("x" * 1000).startswith("'xx")
    assert shown([1, 2]) == shown((1, 2)) == "[1, 2]"
    for many in (range(10**6), ["a" * 100] * 1000):
        assert shown(list(many)) == shown(tuple(many))
        assert len(shown(list(many))) < 1.1 * MAX_SHOWN
    assert shown(dict.fromkeys(range(1000))) == "a dict of 1000 entries"


# Each field that may hold many values, with one more than its declaration allows.
LONGEST = {
    "logit_bias": dict.fromkeys(range(4097), 1),
    "allowed_token_ids": range(2**18 + 1),
    "bad_words": ["a"] * 1025,
    "stop": ["a"] * 17,
    "stop_token_ids": range(4097),
}


def test_every_repeated_field_has_a_limit() -> None:
    repeated = {
        name for name, row in PARAMETERS.items() if isinstance(row.kind, Texts | TokenIds | TokenValues)
    }
    assert repeated == LONGEST.keys()


@pytest.mark.parametrize("field", LONGEST)
def test_one_more_than_the_limit_is_refused_with_the_limit(field: str) -> None:
    values = LONGEST[field]
    with pytest.raises(
        InvalidRequestError, match=f"^{field} holds {len(values)} entries; .* at most "
    ) as caught:
        SamplingParams(**{field: values})
    assert caught.value.field == field
    fewer = dict(list(values.items())[1:]) if isinstance(values, dict) else list(values)[1:]
    assert len(getattr(SamplingParams(**{field: fewer}), field)) == len(fewer)


class Uncounted:
    """Sixteen million entries of which none may be looked at."""

    def __len__(self) -> int:
        return 16_000_000

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("an entry was looked at before the length")


@pytest.mark.parametrize("field", [name for name in LONGEST if name != "logit_bias"])
def test_the_length_is_compared_before_any_entry_is_looked_at(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="holds 16000000 entries"):
        SamplingParams(**{field: Uncounted()})


def test_a_generator_without_end_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="holds 4097 entries"):
        SamplingParams(stop_token_ids=itertools.count())


def test_other_spellings_become_one() -> None:
    params = SamplingParams(top_k=-1, stop="a", bad_words=None, stop_token_ids=[1], logit_bias={"5": 1})
    assert (params.top_k, params.stop, params.bad_words) == (0, ("a",), ())
    assert (params.stop_token_ids, params.logit_bias) == ((1,), {5: 1})


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop is .*without detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[3], detokenize=False).stop_token_ids == (3,)


def test_every_default_is_legal() -> None:
    for row in PARAMETERS.values():
        assert row.help.endswith((".", "}."))
        if row.default is not None:
            assert row.kind.accept(row.default) == row.default
        else:
            assert row.none


def test_shards_get_the_parameters_that_they_draw_by() -> None:
    drawn = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": (1, 2),
        "structured_outputs": StructuredOutputs("regex", "a+"),
        "min_tokens": 4,
        "logprobs": 2,
        "prompt_logprobs": 0,
    }
    request = Request(
        request_id="r",
        prompt_token_ids=(1,),
        params=SamplingParams(stop="x", stop_token_ids=[7], **drawn),
        seed=1,
        eos_token_ids=(9,),
        bad_words=((5, 6),),
    )
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling_spec(request)), type=SamplingSpec)
    assert {name: getattr(spec, name) for name in ShardParams.__struct_fields__} == drawn
    assert (spec.bad_words, spec.end_token_ids, spec.grammar_end_ids) == (((5, 6),), (9, 7), (9,))
    assert (spec.num_logprobs, spec.num_prompt_logprobs) == (2, 0)


def test_a_parameter_is_spelled_where_it_is_declared_and_where_it_is_used() -> None:
    """min_p, which only shards use: adding one like it touches the declaration and the shards' code."""
    root = Path(actors.__file__).parents[1]
    files = [*root.glob("actors/**/*.py"), *root.glob("cluster/**/*.py")]
    word = re.compile(r"\bmin_p\b")
    found = {str(file.relative_to(root)) for file in files if word.search(file.read_text(encoding="utf-8"))}
    found.discard("actors/model/known_fields.py")  # old config.json files hold defaults of generation
    assert {file for file in found if not file.startswith("actors/shard/")} == {"actors/sampling_params.py"}
