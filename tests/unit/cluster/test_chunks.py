"""Chunks of a streamed answer add up to the whole one, however its tokens are cut into updates."""

import random

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cluster.openai.answers import choice_logprobs
from cluster.openai.bodies import parse_body
from cluster.openai.chunks import Chunks
from cluster.outputs import CompletionOutput, Logprob
from cluster.tokenizer.token_bytes import TokenBytes
from tests.support.groups import load_tokenizer

BODY = parse_body("/v1/completions", {"prompt": "x", "logprobs": 0})


def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def part(ids: list[int], text: str, *, is_last: bool = True) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=ids,
        logprobs=[{token: Logprob(-0.5, 1)} for token in ids],
        finish_reason="length" if is_last else None,
        seed=0,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_parts_add_up(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    if kind == "byte level":
        tokenizer = load_tokenizer()
        ids = tokenizer.encode(" a 日本語 😀 naïve", add_special_tokens=False).ids
        ids += [rng.randrange(2, 6144) for _ in range(20)]
    else:
        tokenizer = byte_fallback()
        ids = [256, 0xE6, 0x97, 0xA5, 257, 0x41, 258, 0xF0, 0x9F, 0x98, 0x80, 256]
        for _ in range(20):
            ids += rng.choice([[256], [257], [258], [0xE6, 0x97, 0xA5], [0x41]])
    token_bytes = TokenBytes(tokenizer)
    text = tokenizer.decode(ids)
    expected = choice_logprobs(BODY, part(ids, text), token_bytes)
    assert expected is not None
    chunks = Chunks(BODY, "id", model="m", token_bytes=token_bytes)
    found: dict[str, list[object]] = {name: [] for name in expected}
    begin = 0
    while begin < len(ids):
        end = min(begin + rng.randint(1, 4), len(ids))
        is_last = end == len(ids)
        for chunk in chunks.piece(part(ids[begin:end], text if is_last else "", is_last=is_last)):
            for name, values in chunk["choices"][0]["logprobs"].items():
                found[name] += values
        begin = end
    assert found == expected
