"""Token ids to text, a few at a time, as a tokenizer would decode them all at once.

`tokenizers.decoders.DecodeStream` keeps every id since the last complete character: a long run of
broken bytes costs quadratic time (4000 of them: 0.9 s) and its text never appears. Here a short window of the
newest ids is decoded again on every push, and its head is dropped where that provably changes nothing.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.byte_fallback import ByteRun, ByteTokens

_REPLACEMENT = "\ufffd"
_KEEP = 6
"""Ids that stay in the window at least: a few more than one character can span."""
_SHRINK_AT = 24


class IncrementalDetokenizer:
    """Text of a growing list of token ids.

    Everything that `push` and `finish` return, joined, equals `tokenizer.decode(all ids)` for any cutting
    into pushes. Text is returned once no later token can change it: never half a UTF-8 sequence. Linear
    time. A byte-fallback decoder judges a run of byte tokens as a whole, so the text of such a run
    comes when another token ends it, or as soon as the run is no UTF-8 any more.
    """

    __slots__ = (
        "_byte_tokens",
        "_emitted",
        "_ids",
        "_run",
        "_shrink_at",
        "_skip_special_tokens",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_tokens = ByteTokens.of(tokenizer, skip_special_tokens=skip_special_tokens)
        self._run: ByteRun | None = None
        """Byte tokens after the window's ids, as long as no other token has ended them."""
        self._clear()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; may be empty."""
        if self._byte_tokens is None:
            return self._push_text(token_ids)
        return "".join(self._push_one(self._byte_tokens, token_id) for token_id in token_ids)

    def finish(self) -> str:
        """The rest, with U+FFFD for bytes that stayed incomplete. The detokenizer is then empty."""
        rest = "" if self._run is None else self._end_run(self._run)
        rest += self._decode(self._ids)[self._emitted :]
        self._clear()
        return rest

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._emitted = 0  # characters of the window's text that were returned
        self._shrink_at = _SHRINK_AT

    def _push_text(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        certain = len(text) - text.endswith(_REPLACEMENT)  # an unfinished UTF-8 sequence is one U+FFFD
        new = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if len(self._ids) >= self._shrink_at:
            self._shrink(text, certain)
        return new

    def _push_one(self, byte_tokens: ByteTokens, token_id: int) -> str:
        """Of a tokenizer with byte fallback: bytes join the run, any other visible token ends it."""
        run = self._run
        byte = byte_tokens.byte_of(token_id)
        if byte is None:
            if run is None:
                return self._push_text((token_id,))
            if byte_tokens.is_invisible(token_id):
                return ""  # the decoder never sees it: the run goes on behind it
            return self._end_run(run) + self._push_text((token_id,))
        if run is None:
            run = self._run = ByteRun()
        was_broken = run.is_broken
        run.append(token_id, byte)
        if was_broken:
            return _REPLACEMENT
        return self._take_run(run) if run.is_broken else ""

    def _end_run(self, run: ByteRun) -> str:
        self._run = None
        return "" if run.is_broken else self._take_run(run)

    def _take_run(self, run: ByteRun) -> str:
        """The text of window and run, which is certain; the run's last byte stays as context.

        Alone in the window it has another text than in the run, which is never returned.
        """
        text = self._decode(self._ids + run.ids)[self._emitted :]
        self._clear()
        self._ids = run.ids[-1:]
        self._emitted = len(self._decode(self._ids))
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _shrink(self, text: str, certain: int) -> None:
        """Drop the window's head, one id of context aside (a decoder may strip the first word's space).

        A cut is safe where the parts decode to the same text as the whole and a certain character follows
        it: a character that spans the cut would appear in both parts.
        """
        ids = self._ids
        for cut in range(len(ids) - _KEEP, max(len(ids) - 3 * _KEEP, 0), -1):
            head = self._decode(ids[:cut])
            context = self._decode(ids[cut - 1 : cut])
            tail = self._decode(ids[cut - 1 :])
            rest = tail[len(context) :]
            if certain > len(head) and tail.startswith(context) and head + rest == text:
                self._ids = ids[cut - 1 :]
                self._emitted -= len(head) - len(context)
                break
        else:
            self._ids = self._without_invisible(ids)
        self._shrink_at = max(_SHRINK_AT, 2 * len(self._ids))

    def _without_invisible(self, ids: list[int]) -> list[int]:
        """Without the ids that decode to nothing anywhere: unknown ones and, if skipped, special ones."""
        special = (
            {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
            if self._skip_special_tokens
            else set()
        )
        return [i for i in ids if i not in special and self._tokenizer.id_to_token(i) is not None]
