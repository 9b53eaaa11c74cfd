"""Kinds of values that a sampling parameter may have: the rule in words, and its check.

`accept` gives a legal value in its one form (vLLM's other spellings become it) and raises ValueError for any
other; its words, where it has any, say what is wrong in place of the value. Sizes are compared first, so
refusing costs nothing. `from_flag` reads a flag's text; what it cannot read is returned, to be refused.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

MAX_COUNT = 2**63 - 1
"""What messages between processes and the shards' arrays hold."""


def is_text(value: object) -> bool:
    """Whether it is a str that UTF-8 can carry: JSON's lone surrogates ("\\ud800") are none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Kind(Protocol):
    """One kind of value."""

    @property
    def rule(self) -> str:
        """A legal value, as the end of "it must be ..."."""

    @property
    def metavar(self) -> str | None:
        """The value of a flag in a usage line; None for a switch."""

    def accept(self, value: Any) -> Any: ...

    def from_flag(self, text: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`."""

    low: float
    high: float
    off: float | None = None
    """The value that switches the parameter off."""
    above_low: bool = False
    low_is: str = ""
    metavar: str = "X"

    @property
    def rule(self) -> str:
        off = "" if self.off is None or self.low_is else f" ({self.off:g} is off)"
        if self.above_low:
            return f"a number above {self.low:g}, up to {self.high:g}{off}"
        low = f"{self.low:g} ({self.low_is})" if self.low_is else f"{self.low:g}"
        return f"a number from {low} to {self.high:g}{off}"

    def accept(self, value: Any) -> float:
        if not is_whole(value) and not (isinstance(value, float) and math.isfinite(value)):
            raise ValueError
        if not self.low <= value <= self.high or (self.above_low and value == self.low):
            raise ValueError
        return value  # type: ignore[no-any-return]

    def from_flag(self, text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class WholeNumber:
    low: int
    high: int = MAX_COUNT
    words: str = ""
    """The rule, where the bounds alone say it badly."""
    same: Mapping[int, int] = field(default_factory=dict)
    """Second spellings of a value."""
    metavar: str = "N"

    @property
    def rule(self) -> str:
        bounds = f">= {self.low}" if self.high == MAX_COUNT else f"from {self.low} to {self.high}"
        return self.words or f"a whole number {bounds}"

    def accept(self, value: Any) -> int:
        if not is_whole(value) or not self.low <= value <= self.high:
            raise ValueError
        return self.same.get(value, value)

    def from_flag(self, text: str) -> Any:
        try:
            return int(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Switch:
    rule: str = "true or false"
    metavar: None = None

    def accept(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    def from_flag(self, text: bool) -> Any:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts; a single one may stand without its list, and None for none."""

    max_count: int
    max_length: int
    max_total: int
    """Characters, of one text and of all together."""
    may_be_blank: bool
    metavar: str = "TEXT"

    @property
    def rule(self) -> str:
        total = f" ({self.max_total} in all)" if self.max_total < self.max_count * self.max_length else ""
        kind, blank = ("non-empty strings", "") if self.may_be_blank else ("texts", ", none of them blank")
        return f"at most {self.max_count} {kind} of at most {self.max_length} characters{total}{blank}"

    def accept(self, value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else _listed(value, self.max_count)
        lengths = [len(text) if isinstance(text, str) else 0 for text in texts]
        if any(not 0 < length <= self.max_length for length in lengths) or sum(lengths) > self.max_total:
            raise ValueError
        if not all(is_text(text) and (self.may_be_blank or text.strip()) for text in texts):
            raise ValueError
        return texts

    def from_flag(self, text: list[str]) -> Any:
        return tuple(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Token ids. Which ones the vocabulary has is the front end's to check."""

    min_count: int = 0
    max_count: int
    metavar: str = "ID,ID,..."

    @property
    def rule(self) -> str:
        if self.min_count:
            return f"at least one token id of the vocabulary, and at most {self.max_count}"
        return f"at most {self.max_count} token ids of the vocabulary"

    def accept(self, value: Any) -> tuple[int, ...]:
        ids = _listed(value, self.max_count)
        if len(ids) < self.min_count or not all_whole(ids) or min(ids, default=0) < 0:
            raise ValueError
        return ids

    def from_flag(self, text: str) -> Any:
        try:
            return [int(word) for word in text.split(",")]
        except ValueError:
            return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """{token id: number}; JSON's text keys are read as ids."""

    max_count: int
    low: float
    high: float
    metavar: str = "JSON"

    @property
    def rule(self) -> str:
        return (
            f"an object of at most {self.max_count} token ids with numbers from {self.low:g} to {self.high:g}"
        )

    def accept(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise ValueError
        _require_count(value, self.max_count)
        number = Number(self.low, self.high)
        found = {_token_id(t): number.accept(v) for t, v in value.items()}
        if len(found) < len(value):
            raise ValueError("a token id twice")
        if not all_whole(found) or min(found, default=0) < 0:
            raise ValueError
        return found

    def from_flag(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def _token_id(key: Any) -> Any:
    """JSON's text key as the id that it writes, in the one way to write it."""
    is_id = isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal()
    return int(key) if is_id and str(int(key)) == key else key


def all_whole(values: Iterable[object]) -> bool:
    """Whether all are ints; of a million in some milliseconds."""
    return all(issubclass(kind, int) and kind is not bool for kind in set(map(type, values)))


def _listed(value: Any, max_count: int) -> tuple[Any, ...]:
    """None means none; what is no list stays out, text too, which would fall into characters."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError
    if isinstance(value, Sized):
        _require_count(value, max_count)
    found = tuple(islice(value, max_count + 1))
    _require_count(found, max_count)
    return found


def _require_count(values: Sized, max_count: int) -> None:
    if len(values) > max_count:
        raise ValueError(f"{len(values)} entries")
