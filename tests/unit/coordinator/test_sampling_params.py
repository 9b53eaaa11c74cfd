"""What a request may ask for: the edges of each parameter, and the words that refuse what lies beyond."""

from typing import Any

import msgspec
import numpy as np
import pytest

from actors.sampling_params import SamplingParams
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
    assert shown([1, 2]) == "[1, 2]"
