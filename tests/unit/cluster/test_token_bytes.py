"""Bytes and offsets of tokens, and the log probabilities that show them."""

import json
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from actors.requests import RequestUpdate, TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.answers import _by_text, answer_body
from cluster.openai.bodies import parse_body
from cluster.outputs import Logprob, OutputBuilder
from cluster.tokenizer import load_tokenizer
from cluster.tokenizer.token_bytes import TokenBytes

BACKEND: tokenizers.Tokenizer = load_tokenizer(BUNDLED_CHECKPOINT).backend
TEXTS = ["plain words here", "naïve café — 東京 🙂👩‍👩‍👧", " tabs\t\n\n", "", "漢", "<|user|>Hi<|eos|>"]


def byte_fallback() -> tokenizers.Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "é": 259}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def byte_ids() -> list[int]:
    """The ids of single bytes, found by what they decode to together."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return [BACKEND.token_to_id(letter) for letter in alphabet]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_are_those_of_the_text(text: str) -> None:
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    assert b"".join(map(TokenBytes(BACKEND).of, ids)) == text.encode()


def test_every_token_has_the_bytes_that_it_decodes_to() -> None:
    """Whole characters by the library's own decoding; parts of them together with their neighbours."""
    token_bytes = TokenBytes(BACKEND)
    for token_id in range(BACKEND.get_vocab_size()):
        decoded = BACKEND.decode([token_id], skip_special_tokens=False)
        assert token_bytes.of(token_id).decode("utf-8", "replace") == decoded
    assert sorted(map(token_bytes.of, byte_ids())) == [bytes([byte]) for byte in range(256)]
    assert token_bytes.of(10**6) == b""


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", [lambda: BACKEND, byte_fallback], ids=["byte level", "byte fallback"])
def test_offsets_are_where_a_tokens_first_byte_is_shown(make: Any, skip: bool) -> None:
    """Reference: what the decoding of the tokens before it and of one more byte agree on."""
    backend, rng = make(), random.Random(7)
    token_bytes = TokenBytes(backend)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    pool = byte_ids() if backend is BACKEND else list(range(256))
    for _ in range(300):
        ids = [
            rng.choice(pool) if rng.random() < 0.6 else rng.randrange(backend.get_vocab_size())
            for _ in range(rng.randrange(1, 12))
        ]
        if rng.random() < 0.5:
            ids = backend.encode(rng.choice(TEXTS)).ids
        text = backend.decode(ids, skip_special_tokens=skip)
        found = token_bytes.offsets(ids, text, skip_special_tokens=skip)
        assert len(found) == len(ids)
        assert found == sorted(found)
        for position, start in enumerate(found):
            shown = not (skip and ids[position] in special)
            own = token_bytes.text(ids[position])
            alone = backend is BACKEND or position > 0  # a leading space is stripped
            if own and shown and alone:
                spoiled = backend is not BACKEND and ids[position] < 256 and text[start] == "\ufffd"
                assert text[start:].startswith(own) or spoiled, (ids, text, found)


def choices(endpoint: str, entries: tuple[TokenLogprob, ...], **body: Any) -> dict[str, Any]:
    frontend = ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, seed=0
    )
    params = SamplingParams(logprobs=20, max_tokens=len(entries))
    builder = OutputBuilder(frontend.build_request("0", "Hi", params), frontend)
    ids = tuple(entry.token_id for entry in entries)
    builder.push(RequestUpdate(request_id="0", token_ids=ids, logprobs=entries, finish_reason="length"))
    parsed = parse_body(endpoint, body)
    answer = answer_body(parsed, [builder], frontend)
    found: dict[str, Any] = json.loads(json.dumps(answer))["choices"][0]
    return found


def entries_of(data: bytes) -> tuple[TokenLogprob, ...]:
    """A token for each byte; twenty parts of characters are its alternatives."""
    by_byte = {TokenBytes(BACKEND).of(token_id): token_id for token_id in byte_ids()}
    tops = [by_byte[bytes([byte])] for byte in range(0x80, 0x94)]
    return tuple(
        TokenLogprob(
            token_id=by_byte[bytes([byte])],
            logprob=-1.0,
            top=tuple((token_id, -2.0 - i) for i, token_id in enumerate(tops)),
        )
        for byte in data
    )


def test_completions_show_every_alternative_and_true_offsets() -> None:
    text = ", Él."
    found = choices("/v1/completions", entries_of(text.encode()), prompt="Hi", logprobs=20)
    assert found["text"] == text
    logprobs = found["logprobs"]
    assert logprobs["tokens"] == [",", " ", "bytes:\\xc3", "bytes:\\x89", "l", "."]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert len(top) == (20 if token == "bytes:\\x89" else 21)
        assert top[token] in (-1.0, -11.0)
        assert {"bytes:\\x80", "bytes:\\x93"} <= set(top)


def test_alternatives_that_share_a_text_are_shown_by_their_ids() -> None:
    """A vocabulary may hold a text twice: as a special token, and as one of the model's."""
    entry = TokenLogprob(token_id=5, logprob=-1.0, top=((5, -1.0), (70, -2.0), (71, -3.0)))

    class Twins(TokenBytes):
        def of(self, token_id: int) -> bytes:
            return b"same" if token_id in (5, 70) else super().of(token_id)

    alternatives = {token_id: Logprob(logprob=value) for token_id, value in entry.top}
    shown = _by_text(alternatives, Twins(BACKEND))
    assert shown == {"same": -1.0, "token_id:70": -2.0, BACKEND.decode([71]): -3.0}


def test_bytes_of_a_chat_can_be_joined() -> None:
    text = "漢!"
    chat = [{"role": "user", "content": "Hi"}]
    found = choices(
        "/v1/chat/completions", entries_of(text.encode()), messages=chat, logprobs=True, top_logprobs=20
    )
    content = found["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in text.encode()]
    assert [entry["token"] for entry in content] == ["\\xe6", "\\xbc", "\\xa2", "!"]
    assert [len(entry["top_logprobs"]) for entry in content] == [20] * 4
    assert content[0]["top_logprobs"][0] == {"token": "\\x80", "logprob": -2.0, "bytes": [0x80]}
