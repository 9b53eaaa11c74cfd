"""The bytes that a token stands for; a text shows them only where they are whole characters."""

import itertools
from collections.abc import Iterator, Sequence

import tokenizers

from actors.token_text import BYTE_TOKEN, bytes_of, decoder_kinds


class TokenBytes:
    """Bytes by token id, of byte-level tokenizers and those with byte fallback. Others give the bytes of a
    token's own text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._decoders = decoder_kinds(backend)
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    def of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know."""
        return bytes_of(self._backend, self._decoders, token_id)

    def text(self, token_id: int) -> str | None:
        """None for bytes that are no whole characters."""
        try:
            return self.of(token_id).decode()
        except UnicodeDecodeError:
            return None

    def offsets(
        self, token_ids: Sequence[int], text: str | None, *, skip_special_tokens: bool = True, start: int = 0
    ) -> list[int]:
        """Where each token begins in the text that they make, in characters: within a character, where that
        begins; a token without text is where the text goes on.

        text: all of it, which may end before the tokens do; None: it goes on. start: characters before the
        first of these tokens, where a character begins.
        """
        hidden = self._special if skip_special_tokens else frozenset[int]()
        parts = [b"" if token_id in hidden else self.of(token_id) for token_id in token_ids]
        starts = [start]
        for run, is_byte_run in self._runs(token_ids, parts):
            spoils = is_byte_run and (text is not None or not _may_be_completed(run))
            starts[-1:] = [starts[-1] + index for index in _character_indices(run, spoils)]
        first = 1 if not start and "Strip" in self._decoders and b"".join(parts[:1]).startswith(b" ") else 0
        positions = itertools.accumulate(map(len, parts), initial=0)
        end = len(text) if text is not None else starts[-1]
        return [min(max(starts[at] - first, 0), end) for at, _ in zip(positions, parts, strict=False)]

    def num_settled(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, start: int = 0
    ) -> int | None:
        """Characters of these tokens' text, if whatever follows changes none of them; None: it may.

        start: as in `offsets`.
        """
        hidden = self._special if skip_special_tokens else frozenset[int]()
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        last = (self._backend.id_to_token(shown[-1]) or "") if shown else ""
        if "ByteFallback" in self._decoders and BYTE_TOKEN.fullmatch(last):
            return None
        try:
            text = b"".join(map(self.of, shown)).decode()
        except UnicodeDecodeError:
            return None
        return len(text) - (not start and "Strip" in self._decoders and text.startswith(" "))

    def _runs(self, token_ids: Sequence[int], parts: Sequence[bytes]) -> Iterator[tuple[bytes, bool]]:
        """Bytes that the decoder judges together, and whether one wrong byte spoils all of them."""
        if "ByteFallback" not in self._decoders:
            yield b"".join(parts), False
            return
        tokens = [self._backend.id_to_token(token_id) or "" for token_id in token_ids]
        each = zip(tokens, parts, strict=True)
        for is_byte, run in itertools.groupby(each, lambda pair: bool(BYTE_TOKEN.fullmatch(pair[0]))):
            yield b"".join(part for _, part in run), is_byte


def _may_be_completed(data: bytes) -> bool:
    """Whether more bytes could make text of these, which are none yet."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.end == len(data) and error.reason == "unexpected end of data"
    return True


def _character_indices(data: bytes, spoils: bool) -> list[int]:
    """For each byte, and the end, the index of its character. What is no character is U+FFFD: one for as
    many bytes as Python and Rust decode into one, or for each byte of a run that one wrong byte spoils."""
    if spoils:
        try:
            data.decode()
        except UnicodeDecodeError:
            return list(range(len(data) + 1))
    indices: list[int] = []
    count = 0
    while len(indices) < len(data):
        rest = data[len(indices) : len(indices) + 5]
        size = next((n for n in range(1, 5) if len(rest[: n + 1].decode("utf-8", "replace")) > 1), len(rest))
        indices += [count] * size
        count += 1
    return [*indices, count]
