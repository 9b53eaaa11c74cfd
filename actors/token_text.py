"""The bytes that each token stands for.

Source: the decoders ByteLevel and ByteFallback of tokenizers 0.23.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte, in vocabularies with byte fallback."""


def _byte_level_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_level_letters()


def decoder_kinds(backend: tokenizers.Tokenizer) -> dict[str, Mapping[str, Any]]:
    """The decoder and those inside it, by type."""
    decoder = backend.decoder
    return dict(_flat(json.loads(decoder.__getstate__()))) if decoder is not None else {}


def bytes_of(backend: tokenizers.Tokenizer, kinds: Mapping[str, Any], token_id: int) -> bytes:
    """Of a byte-level token or one with byte fallback, its bytes; of others those of its text. kinds: of
    `decoder_kinds`. Empty for an id that the tokenizer does not know."""
    token = backend.id_to_token(token_id)
    if token is None:
        return b""
    if "ByteLevel" in kinds:
        letters = [_LETTERS.get(letter) for letter in token]
        return token.encode() if None in letters else bytes(byte for byte in letters if byte is not None)
    if "ByteFallback" in kinds:
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()
    return backend.decode([token_id], skip_special_tokens=False).encode()


def _flat(decoder: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield decoder["type"], decoder
    for inner in decoder.get("decoders", ()):
        yield from _flat(inner)
