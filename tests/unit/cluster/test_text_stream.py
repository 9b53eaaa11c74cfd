"""Held-back text: what is shown is exactly the text before the stop string, and never a piece of it."""

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.coordinator.stopping import StopConditions
from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from cluster.answering.movable_sequence import Holding
from cluster.config import BUNDLED_CHECKPOINT
from cluster.tokenizer import TextStream, load_tokenizer

TOKENIZER: tokenizers.Tokenizer = load_tokenizer(BUNDLED_CHECKPOINT).backend


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def first_to_end(text: str, stops: list[str], decided: int) -> tuple[int, str] | None:
    """(start, stop) that ends first beyond `decided`, then the first of the list: the coordinator's rule."""
    found = [
        (start + len(stop), i, start)
        for i, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > decided
    ]
    return (min(found)[2], stops[min(found)[1]]) if found else None


def certain(ids: list[int]) -> str:
    return TOKENIZER.decode(ids).rstrip("\ufffd")


SMALL_ALPHABET = st.text(alphabet="ab \né🙂", min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(
    text=SMALL_ALPHABET,
    stops=st.lists(st.text(alphabet="ab \né🙂", min_size=1, max_size=4), max_size=3),
    min_tokens=st.sampled_from([0, 0, 1, 3, 8]),
    include_stop=st.booleans(),
    data=st.data(),
)
def test_pieces_are_the_text_before_the_stop_string(
    text: str, stops: list[str], min_tokens: int, include_stop: bool, data: st.DataObject
) -> None:
    """Against the plain way: decode everything, cut once. Ids come in random pieces, as from verifies."""
    ids = ids_of(text)
    found, end = None, len(ids)
    decided = len(certain(ids[:min_tokens]))
    for end in range(min_tokens + 1, len(ids) + 1):  # the coordinator stops at the first token that completes
        if found := first_to_end(certain(ids[:end]), stops, decided):
            break
    end = end if found else len(ids)
    expected = TOKENIZER.decode(ids[:end])
    if found:
        start, stop = found
        expected = expected[: start + len(stop) * include_stop]

    stream = TextStream(TOKENIZER, stop=stops, min_tokens=min_tokens, include_stop=include_stop)
    shown, at = "", 0
    while at < end:
        step = data.draw(st.integers(1, 4), label="step")
        shown += stream.push(ids[at : min(at + step, end)])
        assert expected.startswith(shown), "something was shown that has to be taken back"
        at += step
    assert shown + stream.finish(found[1] if found else None) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=SMALL_ALPHABET,
    stops=st.lists(st.text(alphabet="ab \né🙂", min_size=1, max_size=4), max_size=3, unique=True),
    min_tokens=st.sampled_from([0, 0, 1, 3, 8]),
    include_stop=st.booleans(),
    data=st.data(),
)
def test_updates_from_coordinator_to_text(
    text: str, stops: list[str], min_tokens: int, include_stop: bool, data: st.DataObject
) -> None:
    """The coordinator finds the stop and counts held tokens, a front end holds them, and makes text."""
    ids = ids_of(text)
    params = SamplingParams(
        stop=tuple(stops), min_tokens=min_tokens, max_tokens=100, include_stop_str_in_output=include_stop
    )
    request = Request(request_id="r", prompt_token_ids=(1,), params=params, seed=0, eos_token_ids=())
    conditions = StopConditions(request, limit=1 + len(ids), tokenizer=TOKENIZER)
    holding, stream = Holding(), TextStream.of(params, TOKENIZER)
    kept, shown, at = [], "", 0
    while conditions.finish_reason is None:
        emitted = ids[at : at + data.draw(st.integers(1, 4), label="step")]
        emitted = emitted[: conditions.cut(1 + at, emitted)]
        at += len(emitted)
        update = RequestUpdate(
            request_id="r",
            token_ids=tuple(emitted),
            num_held=conditions.num_held,
            finish_reason=conditions.finish_reason,
            matched_stop=conditions.matched_stop,
        )
        passed = holding.pass_on(update)
        kept += passed.token_ids
        shown += stream.consume(passed)
        matched = conditions.matched_stop
    assert kept == ids[:at]
    whole, decided = TOKENIZER.decode(ids[:at]), len(certain(ids[:min_tokens]))
    if matched is None:
        assert shown == whole
        assert first_to_end(certain(ids[:at]), stops, decided) is None
    else:
        found = first_to_end(certain(ids[:at]), stops, decided)
        assert found is not None
        start, stop = found
        assert (matched, shown) == (stop, whole[: start + len(stop) * include_stop])


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


def test_included_stops_are_text() -> None:
    update = {"request_id": "x", "finish_reason": "stop"}
    stream = TextStream(TOKENIZER, skip_special_tokens=False, include_stop=True)
    assert (
        stream.consume(RequestUpdate(token_ids=(*ids_of("a"), 5), matched_stop=5, **update))
        == "a<|assistant|>"
    )
    stream = TextStream(TOKENIZER, stop=["pit"], include_stop=True)
    assert stream.consume(
        RequestUpdate(token_ids=tuple(ids_of("a capital")), matched_stop="pit", **update)
    ) == ("a capit")


def test_special_tokens_are_skipped_by_default() -> None:
    assert TextStream(TOKENIZER).push([0, *ids_of("a"), 4]) == "a"


def test_the_length_of_stop_strings_costs_next_to_nothing() -> None:
    """Of 16 strings that all nearly begin."""
    [letter] = ids_of("a")

    def seconds(length: int) -> float:
        stop = [f"{'a' * (length - 2)}{chr(98 + i)}x" for i in range(16)]
        stream = TextStream(TOKENIZER, stop=stop)
        start = time.perf_counter()
        for _ in range(1500):
            stream.push([letter])
        return time.perf_counter() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (8, 1024))
    assert long < 5 * short
