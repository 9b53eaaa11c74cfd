"""Held-back text: what is shown is exactly the text before the stop string, and never a piece of it."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.requests import RequestUpdate
from cluster.config import BUNDLED_CHECKPOINT
from cluster.tokenizer import TextStream, Tokenizer

TOKENIZER: tokenizers.Tokenizer = Tokenizer.from_pretrained(BUNDLED_CHECKPOINT).backend


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def first_to_end(text: str, stops: list[str]) -> str | None:
    """The stop that ends first in the text, then the first of the list: the coordinator's rule."""
    found = [(text.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
    return stops[min(found)[1]] if found else None


SMALL_ALPHABET = st.text(alphabet="ab \né🙂", min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    text=SMALL_ALPHABET,
    stops=st.lists(st.text(alphabet="ab \né🙂", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_pieces_are_the_text_before_the_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    """Against the plain way: decode everything, cut once. Ids come in random pieces, as from verifies."""
    ids = ids_of(text)
    stop, end = None, len(ids)
    for end in range(1, len(ids) + 1):  # the coordinator stops at the first token that completes a stop
        if stop := first_to_end(TOKENIZER.decode(ids[:end]).rstrip("\ufffd"), stops):
            break
    whole = TOKENIZER.decode(ids[:end])
    expected = whole if stop is None else whole[: whole.index(stop)]

    stream = TextStream(TOKENIZER, stop=stops)
    shown, at = "", 0
    while at < end:
        step = data.draw(st.integers(1, 4), label="step")
        shown += stream.push(ids[at : min(at + step, end)])
        assert expected.startswith(shown), "something was shown that has to be taken back"
        at += step
    assert shown + stream.finish(stop) == expected


def test_only_what_may_begin_a_stop_string_waits() -> None:
    stream = TextStream(TOKENIZER, stop=["STOP"])
    assert stream.push(ids_of("go")) == "go"
    assert stream.push(ids_of(" ST")) == " "
    assert stream.push(ids_of("AY")) == "STAY"
    assert stream.push(ids_of("S")) == ""
    assert stream.finish() == "S"


def test_without_stop_strings_only_broken_characters_wait() -> None:
    stream = TextStream(TOKENIZER)
    ids = ids_of("🙂")
    assert len(ids) > 1
    assert stream.push(ids[:-1]) == ""
    assert stream.push(ids[-1:]) == "🙂"
    assert stream.push(ids[:1]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("finish_reason", "matched_stop", "text"),
    [
        ("stop", None, "a"),
        ("stop", 5, "a"),
        ("length", None, "a<|assistant|>"),
        (None, None, "a<|assistant|>"),
    ],
)
def test_a_token_that_ends_the_stream_is_no_text(
    finish_reason: str | None, matched_stop: int | None, text: str
) -> None:
    stream = TextStream(TOKENIZER, skip_special_tokens=False)
    update = RequestUpdate(
        request_id="x",
        token_ids=(*ids_of("a"), 5),
        finish_reason=finish_reason,  # type: ignore[arg-type]
        matched_stop=matched_stop,
    )
    assert stream.consume(update) == text


def test_special_tokens_are_skipped_by_default() -> None:
    assert TextStream(TOKENIZER).push([0, *ids_of("a"), 4]) == "a"
