"""Any cutting of any ids gives the text of all of them, in linear time, never half a character."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from actors.detokenizer import IncrementalDetokenizer

TINY_DSA = Path(__file__).parents[3] / "cluster/assets/tiny-dsa/tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(TINY_DSA))
VOCAB = TOKENIZER.get_vocab_size()
BYTES = [i for i in range(VOCAB) if TOKENIZER.decode([i]) == "\ufffd"]
"""Tokens that are no whole UTF-8 sequence."""
TEXT = "Hello, 你好世界! 🎉👩‍👩‍👧‍👦 naïve café\n\n  Ελληνικά العربية हिन्दी 한국어 <|user|> end "


def pieces(tokenizer: Tokenizer, cuts: list[list[int]], **kwargs) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    return [*map(detokenizer.push, cuts), detokenizer.finish()]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    parts = []
    for size in sizes:
        parts.append(ids[:size])
        ids = ids[size:]
    return [*parts, ids]


ids_of_any_kind = st.lists(
    st.one_of(
        st.integers(0, VOCAB - 1).map(lambda i: [i]),
        st.sampled_from(BYTES).map(lambda i: [i]),
        st.integers(0, 7).map(lambda i: [i]),  # special
        st.integers(VOCAB, VOCAB + 5).map(lambda i: [i]),  # padding of the vocabulary
        st.text(max_size=3).map(lambda s: TOKENIZER.encode(s, add_special_tokens=False).ids),
        st.tuples(st.sampled_from(BYTES), st.integers(1, 40)).map(lambda b: [b[0]] * b[1]),
    ),
    max_size=25,
).map(lambda parts: [i for part in parts for i in part])


@given(ids_of_any_kind, st.lists(st.integers(0, 9), max_size=40), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_cutting_gives_the_whole_text(ids, sizes, skip_special_tokens) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
    for cuts in (cut(ids, sizes), [[i] for i in ids], [ids]):
        assert "".join(pieces(TOKENIZER, cuts, skip_special_tokens=skip_special_tokens)) == whole


@pytest.mark.product(0)
@pytest.mark.slow
@given(ids_of_any_kind, st.booleans())
@settings(max_examples=5_000, deadline=None)
def test_any_cutting_gives_the_whole_text_often(ids, skip_special_tokens) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces(TOKENIZER, [[i] for i in ids], skip_special_tokens=skip_special_tokens)) == whole


def test_text_is_whole_characters_and_comes_at_once() -> None:
    ids = TOKENIZER.encode(TEXT * 5, add_special_tokens=False).ids
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    text = ""
    for n, token_id in enumerate(ids, 1):
        text += detokenizer.push([token_id])
        assert "\ufffd" not in text
        assert text == TOKENIZER.decode(ids[:n], skip_special_tokens=False).rstrip("\ufffd")
    assert text == TEXT * 5
    assert detokenizer.finish() == ""


def test_broken_bytes_come_out_while_the_run_goes_on() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    text = "".join(detokenizer.push([BYTES[0]]) for _ in range(100))
    assert text == "\ufffd" * 99
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("num_special", [1, 10, 30, 100])
def test_a_character_around_skipped_special_tokens(num_special) -> None:
    first, *rest = TOKENIZER.encode("你", add_special_tokens=False).ids
    ids = [*[40] * 20, first, *[3] * num_special, *rest, *[41] * 30]
    assert len(rest) > 0
    assert "".join(pieces(TOKENIZER, [[i] for i in ids])) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("token_id", [BYTES[0], BYTES[-1], 3, VOCAB + 1, 40])
def test_time_is_linear(token_id) -> None:
    """Broken bytes, skipped specials, unknown ids, plain tokens: 8 times the ids, not 64 times the time."""

    def seconds(n: int) -> float:
        started = time.process_time()
        pieces(TOKENIZER, [[token_id]] * n)
        return time.process_time() - started

    short = min(seconds(1000) for _ in range(3))
    assert min(seconds(8000) for _ in range(3)) < 24 * short


def test_a_decoder_that_strips_the_first_space() -> None:
    words = ["▁Hello", "▁big", "▁wide", "world", "▁", "!"]
    model = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="!")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    ids = [0, 1, 2, 3, 4, 5, 1, 2] * 30
    assert "".join(pieces(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)
