"""Tokens held for stop strings, against the definition, computed anew after every token."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.coordinator.stopping import StopStringFinder
from actors.detokenizer import IncrementalDetokenizer
from tests.support.groups import load_tokenizer

TOKENIZER: Tokenizer = load_tokenizer()
LETTERS = [TOKENIZER.token_to_id(c) for c in "abc"]
TEXT = "ab é漢 abcab \U0001f642"
IDS = sorted({*LETTERS, *TOKENIZER.encode(TEXT, add_special_tokens=False).ids})


class Reader:
    """Counts the tokens that may be let go, as a reader of the updates would."""

    def __init__(self, stop: list[str]) -> None:
        self._finder = StopStringFinder(stop, TOKENIZER, skip_special_tokens=True)
        self._num_held = 0

    def push(self, token_ids: list[int]) -> int:
        for token_id in token_ids:
            self._finder.push(token_id)
        num_waiting, self._num_held = self._num_held + len(token_ids), self._finder.num_held
        return num_waiting - self._num_held


def num_safe(ids: list[int], stop: list[str]) -> int:
    """Tokens whose text ends before any suffix that begins a stop string."""
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    ends, text = [], ""
    for token_id in ids:
        text += detokenizer.push([token_id])
        ends.append(len(text))
    undecided = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return sum(end <= len(text) - undecided for end in ends)


@settings(deadline=None, max_examples=200)
@given(
    ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 3), min_size=12, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(ids=[LETTERS[0]] * 5 + [LETTERS[1]], cuts=[1] * 12, stop=["aab"])
@example(ids=LETTERS * 2, cuts=[1] * 12, stop=["abca", "c"])
def test_exactly_the_undecided_tokens_are_held(ids, cuts, stop):
    reader = Reader(stop)
    sent = expected = start = 0
    for cut in cuts:
        part = ids[start : start + cut]
        start += len(part)
        sent += reader.push(part)
        expected = max(expected, num_safe(ids[:start], stop))  # what was sent stays sent
        assert sent == expected


@pytest.mark.parametrize("stop", ["é!", "漢"])
def test_half_a_character_may_begin_a_stop_string(stop):
    ids = [TOKENIZER.token_to_id("a")]
    bytes_of_it = TOKENIZER.encode(stop[0], add_special_tokens=False).ids
    reader = Reader([stop])
    assert reader.push(ids) == 1
    if len(bytes_of_it) > 1:
        assert reader.push(bytes_of_it[:-1]) == 0
    assert Reader(["x"]).push(bytes_of_it[:1]) == 1


def test_special_tokens_do_not_delay_an_ascii_stop():
    reader = Reader(["abc"])
    assert [reader.push([token]) for token in (3, 4, LETTERS[0], 5, LETTERS[0], LETTERS[2])] == [
        *(1, 1),  # no text, nothing begins
        *(0, 0),  # "a" may begin the stop; what follows waits behind it
        2,  # the second "a" takes its place
        2,
    ]


@settings(deadline=None, max_examples=200)
@given(text=st.text("ab", max_size=40), stop=st.text("ab", min_size=1, max_size=12))
def test_long_beginnings_fall_back_to_shorter_ones(text, stop):
    ids = [TOKENIZER.token_to_id(c) for c in text]
    reader, sent, expected = Reader([stop]), 0, 0
    for end in range(1, len(ids) + 1):
        sent += reader.push(ids[end - 1 : end])
        expected = max(expected, num_safe(ids[:end], [stop]))
        assert sent == expected


def test_the_length_of_stop_strings_costs_next_to_nothing():
    """Of 16 strings that all nearly begin; scanning for every beginning took a hundred times as long."""

    def seconds(length: int) -> float:
        stop = [f"{'a' * (length - 2)}{chr(98 + i)}x" for i in range(16)]
        reader = Reader(stop)
        start = time.perf_counter()
        for _ in range(1500):
            reader.push(LETTERS[:1])
        return time.perf_counter() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (8, 1024))
    assert long < 5 * short
