"""Byte tokens of SentencePiece-style tokenizers: <0xE4> stands for one byte of a character.

The decoder `ByteFallback` gathers consecutive byte tokens: if together they are UTF-8, their text is that,
else each of them is one U+FFFD (tokenizers, decoders/byte_fallback.rs).
"""

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteTokens:
    """Which ids are byte tokens, and which ids the decoder never sees."""

    __slots__ = ("_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> "ByteTokens | None":
        """None for a tokenizer without byte fallback."""
        if tokenizer.decoder is None or not _has_byte_fallback(json.loads(tokenizer.decoder.__getstate__())):
            return None
        return cls(tokenizer, skip_special_tokens=skip_special_tokens)

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a byte token stands for."""
        found = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return None if found is None or self.is_invisible(token_id) else int(found[1], 16)

    def is_invisible(self, token_id: int) -> bool:
        """An unknown id, or a special token where those are skipped."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        if not self._skip_special_tokens:
            return False
        # Asked of the decoder: a list of all special tokens would cost milliseconds for each request.
        shown = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return shown != "" and self._tokenizer.decode([token_id], skip_special_tokens=True) == ""


class ByteRun:
    """Consecutive byte tokens."""

    __slots__ = ("_utf8", "ids", "is_broken")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.is_broken = False
        """The bytes are no beginning of any UTF-8 text. Only the last id is kept from then on."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def append(self, token_id: int, byte: int) -> None:
        if self.is_broken:
            self.ids = [token_id]
            return
        self.ids.append(token_id)
        try:
            self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self.is_broken = True


def _has_byte_fallback(decoder: Mapping[str, Any]) -> bool:
    return decoder["type"] == "ByteFallback" or any(map(_has_byte_fallback, decoder.get("decoders", ())))
