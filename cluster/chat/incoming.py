"""Text that comes in pieces, read by generators as if it were there at once.

A reader yields what it makes of the text, and None where it needs more. It decides by what stands in the text
alone, never by where a piece ends: so what it makes is the same for every way to cut the text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cluster.chat.answer_parts import Part

Result = TypeVar("Result")
Reader = Generator[Part | None, None, Result]

MAX_SPACE = 64
"""Characters of white space between marks; more are no part of a form."""
MAX_NAME = 256
"""Characters of a tool's or parameter's name."""
NO_TAIL = re.compile(r"\Z")
SPACE_BEFORE = re.compile(rf"\s{{0,{MAX_SPACE}}}\Z")


class Incoming:
    """What has come and was not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def skip(self, num_characters: int) -> str:
        """Read so much."""
        text, self.text = self.text[:num_characters], self.text[num_characters:]
        return text


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none."""


@dataclass(frozen=True, slots=True)
class Name:
    """A run of characters, none of `without`; it ends before the first of these."""

    without: str


Pattern = Sequence[str | Space | Name]
"""Marks as they stand, spaces and names one after the other."""


def matched(incoming: Incoming, *patterns: Pattern) -> Generator[None, None, tuple[int, list[str]] | None]:
    """Which of the patterns the text begins with (the first that does), and its names; the pattern is read.

    None: with none of them; nothing is read.
    """
    for number, pattern in enumerate(patterns):
        while True:
            found = _match(pattern, incoming)
            if found is not _MORE:
                break
            yield None
        if isinstance(found, _Match):
            incoming.skip(found.end)
            return number, found.names
    return None


def before(
    incoming: Incoming,
    *marks: str,
    make: Callable[[str], Part],
    tail: re.Pattern[str] = NO_TAIL,
    drop_begun: bool = False,
) -> Reader[bool]:
    """Read the text before the first of the marks, without what `tail` finds in front of it.

    The mark stays unread, with its tail. False: the text has ended without a mark, and all was read.
    tail: matches at the end of a text; whatever is a beginning of a tail must be one too.
    make: a part of each piece of the text. drop_begun: where the text ends, what has come of a mark or its
    tail is left out.
    """
    while True:
        found = [at for mark in marks if (at := incoming.text.find(mark)) >= 0]
        if found:
            at = min(found)
        elif incoming.ended and not drop_begun:
            at = len(incoming.text)
        else:
            at = len(incoming.text) - max(_num_begun(incoming.text, mark) for mark in marks)
        if found or not incoming.ended or drop_begun:
            at = _start_of(tail, incoming.text, at)
        if at:
            yield make(incoming.skip(at))
        if not found and incoming.ended:
            incoming.skip(len(incoming.text))
        if found or incoming.ended:
            return bool(found)
        yield None


def whole_before(incoming: Incoming, mark: str) -> Generator[None, None, tuple[str, bool]]:
    """All text before the mark, which is read too; without it all that comes, up to where the mark has begun,
    and False."""
    searched = 0
    while (at := incoming.text.find(mark, searched)) < 0:
        if incoming.ended:
            text = incoming.skip(len(incoming.text))
            return text[: len(text) - _num_begun(text, mark)], False
        searched = max(len(incoming.text) - len(mark) + 1, 0)
        yield None
    text = incoming.skip(at)
    incoming.skip(len(mark))
    return text, True


@dataclass(frozen=True, slots=True)
class _Match:
    end: int
    names: list[str]


_MORE = object()
"""More text decides."""
_SPACE = re.compile(r"\s*")


def _match(pattern: Pattern, incoming: Incoming) -> object:
    """A _Match, _MORE, or None."""
    text, at, names = incoming.text, 0, []
    for item in pattern:
        start = at
        if isinstance(item, str):
            if text.startswith(item, at):
                at += len(item)
                continue
            return _MORE if not incoming.ended and item.startswith(text[at:]) else None
        if isinstance(item, Space):
            space = _SPACE.match(text, at)
            assert space is not None
            at, most = space.end(), MAX_SPACE
        else:
            while at < len(text) and text[at] not in item.without and at - start <= MAX_NAME:
                at += 1
            most = MAX_NAME
            if at == start and at < len(text):
                return None
            names.append(text[start:at])
        if at - start > most:
            return None
        if at == len(text):
            return None if incoming.ended else _MORE
    return _Match(at, names)


def _num_begun(text: str, mark: str) -> int:
    """Characters at the end of the text that are a beginning of the mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _start_of(tail: re.Pattern[str], text: str, end: int) -> int:
    """Where the longest tail begins that ends there."""
    found = tail.search(text[max(end - 2 * MAX_SPACE, 0) : end])
    return end if found is None else max(end - 2 * MAX_SPACE, 0) + found.start()
