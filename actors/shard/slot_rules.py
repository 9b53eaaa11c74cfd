"""Rules over single tokens and the history they need, per state slot; gathered for the rows of a batch.

Only slots whose request has rules take memory or time. Token ids become columns of this rank's slice of
the vocabulary at admission; what lies outside is another rank's.
Shape legend: V tokens of the slice.
"""

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.messages import Admission, SamplingSpec
from kernels_integration.logit_rules import Entries, LogitRules, Penalties

logger = logging.getLogger(__name__)

Int64s = NDArray[np.int64]
_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preceding:
    """Drafts before each of R rows: tokens[first[r]:first[r] + count[r]], which may not be accepted yet."""

    tokens: Int64s
    first: Int64s
    """[R]"""
    count: Int64s
    """[R]"""

    def of(self, row: int) -> Int64s:
        return self.tokens[self.first[row] : self.first[row] + self.count[row]]


class _Counts:
    """Penalised slots' tokens: one lane each of [lanes, V]."""

    def __init__(self, slice_size: int) -> None:
        self.completion = torch.zeros(0, slice_size, dtype=torch.int32)
        self.in_prompt = torch.zeros(0, slice_size, dtype=torch.bool)
        self._free: list[int] = []

    def take_lane(self) -> int:
        if not self._free:
            num_lanes = len(self.completion)
            added = max(num_lanes, 1)
            self.completion = torch.cat([self.completion, self.completion.new_zeros(added, self.width)])
            self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(added, self.width)])
            self._free = list(range(num_lanes, num_lanes + added))
        lane = self._free.pop()
        self.completion[lane] = 0
        self.in_prompt[lane] = False
        return lane

    def give_back(self, lane: int) -> None:
        self._free.append(lane)

    @property
    def width(self) -> int:
        return self.completion.shape[1]


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The rules of one admitted request, in columns of the slice."""

    prompt_len: int
    spec: SamplingSpec
    lane: int | None
    allowed: Int64s
    ends: Int64s
    biased: Int64s
    bias: NDArray[np.float64]
    bad_words: dict[int, dict[tuple[int, ...], list[int]]]
    """Number of tokens before the banned one -> those tokens -> banned columns."""
    completion: list[int] = field(default_factory=list)
    """Kept where bad words need it."""

    def banned(self, position: int, drafts: Int64s) -> list[int]:
        """Columns that the token at `position` may not be, after these drafts."""
        columns: set[int] = set()
        if position - self.prompt_len < self.spec.min_tokens:
            columns.update(self.ends.tolist())
        if self.bad_words:
            longest = max(self.bad_words)
            tail = (self.completion[-longest:] if longest else []) + drafts.tolist()
            for length, words in self.bad_words.items():
                if length <= len(tail):  # a word that began in the prompt does not count, as in vLLM
                    columns.update(words.get(tuple(tail[len(tail) - length :]), ()))
        return sorted(columns)


class SlotRules:
    """Owner of every slot's rules and token history. Set at admission, then grown by accepted tokens.

    Rules that raise make their slot's rows draw nothing (NO_TOKEN), and touch no other.
    """

    def __init__(self, *, vocab_start: int, slice_size: int) -> None:
        self._vocab_start = vocab_start
        self._slice_size = slice_size
        self._counts = _Counts(slice_size)
        self._slots: dict[int, _Slot] = {}
        self._failed: set[int] = set()
        """Slots whose rules raised, until their next admission."""

    def fail(self, slot: int) -> None:
        """The slot's request draws nothing any more."""
        self._release(slot)
        self._failed.add(slot)

    def admit(self, admission: Admission) -> None:
        """Replace the slot's rules; admission.history holds the prompt and what was replayed."""
        self._release(admission.slot)
        spec = admission.sampling
        if not spec.has_rules:
            return
        bias = sorted((spec.logit_bias or {}).items())
        biased, own = self._columns([token for token, _ in bias])
        slot = _Slot(
            prompt_len=admission.prompt_len,
            spec=spec,
            lane=self._counts.take_lane() if spec.has_penalties else None,
            allowed=self._columns(sorted(set(spec.allowed_token_ids or ())))[0],
            ends=self._columns(sorted(set(spec.end_token_ids)))[0],
            biased=biased,
            bias=np.array([value for _, value in bias], np.float64)[own],
            bad_words=self._bad_words(spec),
        )
        self._slots[admission.slot] = slot
        if slot.lane is not None:
            prompt, _ = self._columns(admission.history[: admission.prompt_len])
            self._counts.in_prompt[slot.lane, torch.from_numpy(prompt)] = True
        self.append(admission.slot, admission.history[admission.prompt_len :])

    def append(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """These tokens now belong to the slot's completion."""
        rules = self._slots.get(slot)
        if rules is None:
            return
        try:
            self._append(rules, tokens)
        except Exception:
            logger.exception("the rules of slot %d cannot count its tokens", slot)
            self.fail(slot)

    def _append(self, rules: _Slot, tokens: NDArray[np.int32]) -> None:
        if rules.bad_words:
            rules.completion += tokens.tolist()
        if rules.lane is not None:
            columns, _ = self._columns(tokens)
            ones = torch.ones(len(columns), dtype=torch.int32)
            self._counts.completion[rules.lane].index_add_(0, torch.from_numpy(columns), ones)

    def gather(self, slots: Int64s, positions: Int64s, preceding: Preceding | None) -> LogitRules | None:
        """Rules of rows that draw the tokens at `positions` for `slots`; None when no row has any."""
        if not self._slots and not self._failed:
            return None
        banned = self._banned(slots.tolist(), positions.tolist(), preceding)
        rows = [(row, self._slots[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._slots]
        failed = [row for row, slot in enumerate(slots.tolist()) if slot in self._failed]
        if not rows and not failed:
            return None
        restricted = [(row, rules) for row, rules in rows if rules.spec.allowed_token_ids]
        biased = [(row, rules) for row, rules in rows if len(rules.biased)]
        penalised = [(row, rules) for row, rules in rows if rules.lane is not None]
        return LogitRules(
            restricted_rows=torch.tensor([row for row, _ in restricted]) if restricted else None,
            allowed=_entries([(row, rules.allowed) for row, rules in restricted]),
            banned=_entries(banned),
            biased=_entries([(row, rules.biased) for row, rules in biased]),
            bias=torch.from_numpy(np.concatenate([r.bias for _, r in biased])) if biased else None,
            penalties=self._penalties(penalised, preceding) if penalised else None,
            failed_rows=torch.tensor(failed) if failed else None,
        )

    def _banned(
        self, slots: list[int], positions: list[int], preceding: Preceding | None
    ) -> list[tuple[int, Int64s]]:
        """Banned columns by row; slots whose rules raise fail here."""
        found: list[tuple[int, Int64s]] = []
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            rules = self._slots.get(slot)
            if rules is None or not (rules.bad_words or len(rules.ends)):
                continue
            try:
                found.append((row, np.array(rules.banned(position, _drafts(preceding, row)), np.int64)))
            except Exception:
                logger.exception("the rules of slot %d cannot be applied", slot)
                self.fail(slot)
        return found

    def _release(self, slot: int) -> None:
        self._failed.discard(slot)
        old = self._slots.pop(slot, None)
        if old is not None and old.lane is not None:
            self._counts.give_back(old.lane)

    def _penalties(self, rows: list[tuple[int, _Slot]], preceding: Preceding | None) -> Penalties:
        lanes = torch.tensor([rules.lane for _, rules in rows])
        counts = self._counts.completion[lanes]
        if preceding is not None:
            drafts = [preceding.of(row) for row, _ in rows]
            columns, own = self._columns(np.concatenate(drafts))
            entry = np.repeat(np.arange(len(rows)), [len(d) for d in drafts])[own]
            flat = torch.from_numpy(entry * self._slice_size + columns)
            counts.view(-1).index_add_(0, flat, torch.ones(len(flat), dtype=torch.int32))
        return Penalties(
            row=torch.tensor([row for row, _ in rows]),
            repetition=_values([rules.spec.repetition_penalty for _, rules in rows]),
            frequency=_values([rules.spec.frequency_penalty for _, rules in rows]),
            presence=_values([rules.spec.presence_penalty for _, rules in rows]),
            counts=counts,
            in_prompt=self._counts.in_prompt[lanes],
        )

    def _columns(self, tokens: list[int] | NDArray[np.int32] | Int64s) -> tuple[Int64s, NDArray[np.bool_]]:
        """The slice's columns among `tokens`, in their order, and which tokens those are."""
        columns = np.asarray(tokens, np.int64) - self._vocab_start
        own = (columns >= 0) & (columns < self._slice_size)
        return columns[own], own

    def _bad_words(self, spec: SamplingSpec) -> dict[int, dict[tuple[int, ...], list[int]]]:
        found: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in spec.bad_words:
            column = last - self._vocab_start
            if 0 <= column < self._slice_size:
                found.setdefault(len(before), {}).setdefault(tuple(before), []).append(column)
        return found


def _drafts(preceding: Preceding | None, row: int) -> Int64s:
    return _NO_TOKENS if preceding is None else preceding.of(row)


def _entries(rows: list[tuple[int, Int64s]]) -> Entries | None:
    columns = np.concatenate([c for _, c in rows]) if rows else _NO_TOKENS
    if len(columns) == 0:
        return None
    row = np.repeat([row for row, _ in rows], [len(c) for _, c in rows])
    return Entries(row=torch.from_numpy(row), column=torch.from_numpy(columns))


def _values(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
