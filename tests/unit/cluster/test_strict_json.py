"""Bodies are JSON that every reader understands alike."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai.strict_json import json_object
from kernels_integration.errors import InvalidRequestError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_every_object_is_read_as_it_was_written(value: dict[str, Any]) -> None:
    assert json_object(json.dumps(value), what="it", field="body") == value
    assert json_object(json.dumps(value, ensure_ascii=False).encode(), what="it", field="body") == value


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ('{"a": 1, "a": 1}', "a", "gives a twice"),
        ('{"b": [{}, {"c": {"a": 1, "d": 2, "a": 3}}]}', "b[1].c.a", "gives b[1].c.a twice"),
        ('{"b": {"a": 1, "a": 2}, "b": 3}', "b", "twice"),
        ('{"a": NaN}', "body", "'NaN' is no number of JSON"),
        ('{"a": [-Infinity]}', "body", "'-Infinity' is no number of JSON"),
        ("[]", "body", "it must hold one JSON object"),
        ('{"a": 1} {"a": 1}', "body", "not JSON"),
        ("[" * 100_000, "body", "not JSON"),
        (b'{"a": "\xff"}', "body", "not JSON"),
        ("", "body", "not JSON"),
    ],
)
def test_what_readers_disagree_about_is_refused(text: str | bytes, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        json_object(text, what="the body", field="body")
    assert refused.value.field == field
    assert words in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_name_of_any_length_and_depth_is_told_in_short() -> None:
    name = "x" * 100_000
    text = '{"d": ' * 300 + f'{{"{name}": 1, "{name}": 2}}' + "}" * 300
    with pytest.raises(InvalidRequestError) as refused:
        json_object(text, what="the body", field="body")
    assert len(str(refused.value)) < 1000
