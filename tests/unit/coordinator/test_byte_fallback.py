"""Byte tokens in any cutting: the deltas of a stream, joined, are the decoder's text of all ids."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from actors.detokenizer import IncrementalDetokenizer

SPECIAL = "<s>"
PIECES = ["▁Hello", "▁", "a", "b", "é", "東", "▁京", "!", "\ufffd", "<0xZZ>", "▁world", ","]
TEXT = "Hello, 你好 world! 🎉👩‍👩‍👧‍👦 ab é東 京 ཀ ꦲ \U0001f9d1\u200d\U0001f680 end"


def sentencepiece_style(decoder: decoders.Decoder) -> Tokenizer:
    """As Llama's, Gemma's and Mistral's: pieces, and all 256 bytes as tokens."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


STRIPPING = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
TOKENIZERS = {
    "llama": sentencepiece_style(decoders.Sequence(STRIPPING)),
    "gemma": sentencepiece_style(decoders.Sequence(STRIPPING[:3])),
    "nested": sentencepiece_style(decoders.Sequence([decoders.Sequence(STRIPPING[:2]), decoders.Fuse()])),
    "metaspace": sentencepiece_style(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}
LLAMA = TOKENIZERS["llama"]
BYTE = [LLAMA.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
OTHER = [i for i in range(LLAMA.get_vocab_size()) if i not in BYTE]
SPECIAL_ID = LLAMA.token_to_id(SPECIAL)
UNKNOWN_ID = LLAMA.get_vocab_size() + 3


def text_of(tokenizer: Tokenizer, cuts: list[list[int]], **kwargs: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, **kwargs)
    return "".join([*map(detokenizer.push, cuts), detokenizer.finish()])


def bytes_of(text: str) -> list[int]:
    return [BYTE[byte] for byte in text.encode("utf-8", "surrogatepass")]


ids_of_any_kind = st.lists(
    st.one_of(
        st.text(max_size=4).map(bytes_of),  # CJK, emoji, surrogates: lone surrogates are no UTF-8
        st.sampled_from(["你好", "🎉", " ", "é" * 9, "👩‍👩‍👧‍👦"]).map(bytes_of),
        st.sampled_from(BYTE).map(lambda i: [i]),
        st.tuples(st.sampled_from(BYTE), st.integers(1, 40)).map(lambda b: [b[0]] * b[1]),
        st.sampled_from(OTHER).map(lambda i: [i]),
        st.sampled_from([SPECIAL_ID, UNKNOWN_ID]).map(lambda i: [i]),
        st.tuples(st.sampled_from([SPECIAL_ID, UNKNOWN_ID]), st.integers(1, 30)).map(lambda b: [b[0]] * b[1]),
    ),
    max_size=20,
).map(lambda parts: [i for part in parts for i in part])


def check_any_cutting(name: str, ids: list[int], sizes: list[int], skip_special_tokens: bool) -> None:
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    rest, cuts = ids, []
    for size in sizes:
        cuts.append(rest[:size])
        rest = rest[size:]
    for parts in ([*cuts, rest], [[i] for i in ids], [ids]):
        assert text_of(tokenizer, parts, skip_special_tokens=skip_special_tokens) == whole


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    ids_of_any_kind,
    st.lists(st.integers(0, 9), max_size=40),
    st.booleans(),
)
@settings(max_examples=250, deadline=None)
def test_any_cutting_gives_the_whole_text(name, ids, sizes, skip_special_tokens) -> None:
    check_any_cutting(name, ids, sizes, skip_special_tokens)


@pytest.mark.product(0)
@pytest.mark.slow
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    ids_of_any_kind,
    st.lists(st.integers(0, 9), max_size=40),
    st.booleans(),
)
@settings(max_examples=10_000, deadline=None)
def test_any_cutting_gives_the_whole_text_often(name, ids, sizes, skip_special_tokens) -> None:
    check_any_cutting(name, ids, sizes, skip_special_tokens)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_text_of_bytes_and_pieces_comes_back(name) -> None:
    ids = TOKENIZERS[name].encode(TEXT).ids * 5
    assert any(i in BYTE for i in ids)
    assert any(i in OTHER for i in ids)
    whole = TOKENIZERS[name].decode(ids)
    assert "👩‍👩‍👧‍👦" in whole
    assert "\ufffd" not in whole
    assert text_of(TOKENIZERS[name], [[i] for i in ids]) == whole


def test_a_run_of_bytes_waits_for_its_end_and_no_longer() -> None:
    detokenizer = IncrementalDetokenizer(LLAMA)
    a = LLAMA.token_to_id("a")
    assert detokenizer.push([a]) == "a"
    assert detokenizer.push(bytes_of("你好")) == ""  # one broken byte would yet undo both
    assert detokenizer.push([SPECIAL_ID, UNKNOWN_ID]) == ""  # the decoder does not see them
    assert detokenizer.push([a]) == "你好a"
    assert detokenizer.push(bytes_of("你")) == ""
    assert detokenizer.push([BYTE[0xFF]]) == "\ufffd" * 4  # broken for good
    assert detokenizer.push(bytes_of("A")) == "\ufffd"
    assert detokenizer.push([a]) == "a"
    assert detokenizer.push(bytes_of("é")[:1]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        [BYTE[0xFF]],
        [BYTE[0x41]],
        bytes_of("你"),
        [*bytes_of("你") * 30, LLAMA.token_to_id("a")],
        [*bytes_of("你"), BYTE[0xFF], *bytes_of("好") * 20, LLAMA.token_to_id("a")],
        [SPECIAL_ID],
        [BYTE[0xE4], SPECIAL_ID],
    ],
    ids=["broken", "ascii", "one run", "runs and pieces", "broken runs", "special", "special within"],
)
def test_time_is_linear(unit) -> None:
    """8 times the ids, not 64 times the time."""

    def seconds(n: int) -> float:
        ids = (unit * n)[:n]
        started = time.process_time()
        text_of(LLAMA, [[i] for i in ids])
        return time.process_time() - started

    short = min(seconds(1000) for _ in range(3))
    assert min(seconds(8000) for _ in range(3)) < 24 * short


def test_a_tokenizer_of_bytes_that_is_not_sentencepiece_keeps_its_own_way() -> None:
    tokenizer = Tokenizer(models.BPE({"<0x41>": 0, "a": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    assert text_of(tokenizer, [[0], [1]]) == tokenizer.decode([0, 1]) == "<0x41>a"
