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

from actors.grammar.compiler import GrammarCompiler
from actors.messages import Admission, SamplingSpec
from actors.shard.boundary import Boundary
from actors.shard.slot_grammars import SlotGrammars
from kernels_integration.logit_rules import Entries, LogitRules, Penalties, TokenMasks

logger = logging.getLogger(__name__)

Int64s = NDArray[np.int64]
_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preceding:
    """Drafts before each of R rows: tokens[first[r]:first[r] + count[r]], which may not be accepted yet."""

    tokens: Tensor
    """On the device: only rules that ask for drafts wait for them."""
    first: Int64s
    """[R]"""
    count: Int64s
    """[R]"""

    def on_host(self, boundary: Boundary) -> list[Int64s]:
        """[R] the drafts before each row."""
        tokens = boundary.down(self.tokens)
        bounds = zip(self.first.tolist(), (self.first + self.count).tolist(), strict=True)
        return [tokens[first:end] for first, end in bounds]


class _Counts:
    """Penalised slots' tokens: one lane each of [lanes, V]."""

    def __init__(self, slice_size: int, device: torch.device) -> None:
        self.completion = torch.zeros(0, slice_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(0, slice_size, dtype=torch.bool, device=device)
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

    def __init__(
        self,
        *,
        vocab_start: int,
        slice_size: int,
        boundary: Boundary,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """compiler: of grammars; without one a request that has a grammar draws nothing."""
        self._grammars = None
        if compiler is not None:
            self._grammars = SlotGrammars(compiler, vocab_start=vocab_start, slice_size=slice_size)
        self._vocab_start = vocab_start
        self._slice_size = slice_size
        self._boundary = boundary
        self._counts = _Counts(slice_size, boundary.device)
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
            self._counts.in_prompt[slot.lane, self._boundary.up(prompt)] = True
        if spec.structured_outputs is not None and not self._admit_grammar(admission):
            return
        self.append(admission.slot, admission.history[admission.prompt_len :])

    def _admit_grammar(self, admission: Admission) -> bool:
        """Whether the request's grammar can be had; if not, it draws nothing."""
        try:
            assert self._grammars is not None, "this shard was given no compiler of grammars"
            self._grammars.admit(admission.slot, admission.sampling)
        except TimeoutError as error:
            logger.warning("the grammar of slot %d cannot be had: %s", admission.slot, error)
            self.fail(admission.slot)
            return False
        except Exception:
            logger.exception("the grammar of slot %d cannot be had", admission.slot)
            self.fail(admission.slot)
            return False
        return True

    def append(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """These tokens now belong to the slot's completion."""
        rules = self._slots.get(slot)
        if rules is None:
            return
        try:
            self._append(slot, rules, tokens)
        except Exception:
            logger.exception("the rules of slot %d cannot count its tokens", slot)
            self.fail(slot)

    def _append(self, slot: int, rules: _Slot, tokens: NDArray[np.int32]) -> None:
        if self._grammars is not None:
            self._grammars.append(slot, tokens.tolist())
        if rules.bad_words:
            rules.completion += tokens.tolist()
        if rules.lane is not None:
            columns, _ = self._columns(tokens)
            counts = self._counts.completion[rules.lane]
            counts.index_add_(0, self._boundary.up(columns), counts.new_ones(len(columns)))

    def gather(self, slots: Int64s, positions: Int64s, preceding: Preceding | None) -> LogitRules | None:
        """Rules of rows that draw the tokens at `positions` for `slots`; None when no row has any."""
        if self._slots.keys().isdisjoint(slots.tolist()) and self._failed.isdisjoint(slots.tolist()):
            return None
        drafts = [_NO_TOKENS] * len(slots) if preceding is None else preceding.on_host(self._boundary)
        banned = self._banned(slots.tolist(), positions.tolist(), drafts)
        masks = self._masks(slots.tolist(), drafts)
        rows = [(row, self._slots[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._slots]
        failed = [row for row, slot in enumerate(slots.tolist()) if slot in self._failed]
        restricted = [(row, rules) for row, rules in rows if rules.spec.allowed_token_ids]
        biased = [(row, rules) for row, rules in rows if len(rules.biased)]
        penalised = [(row, rules) for row, rules in rows if rules.lane is not None]
        return LogitRules(
            restricted_rows=self._rows([row for row, _ in restricted]) if restricted else None,
            allowed=self._entries([(row, rules.allowed) for row, rules in restricted]),
            masks=masks,
            banned=self._entries(banned),
            biased=self._entries([(row, rules.biased) for row, rules in biased]),
            bias=self._boundary.up(np.concatenate([r.bias for _, r in biased])) if biased else None,
            penalties=self._penalties(penalised, drafts) if penalised else None,
            failed_rows=self._rows(failed) if failed else None,
        )

    def _banned(
        self, slots: list[int], positions: list[int], drafts: list[Int64s]
    ) -> list[tuple[int, Int64s]]:
        """Banned columns by row; slots whose rules raise fail here."""
        found: list[tuple[int, Int64s]] = []
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            rules = self._slots.get(slot)
            if rules is None or not (rules.bad_words or len(rules.ends)):
                continue
            try:
                found.append((row, np.array(rules.banned(position, drafts[row]), np.int64)))
            except Exception:
                logger.exception("the rules of slot %d cannot be applied", slot)
                self.fail(slot)
        return found

    def _masks(self, slots: list[int], drafts: list[Int64s]) -> TokenMasks | None:
        """Of the rows whose requests have grammars; slots whose grammars fail, fail here."""
        if self._grammars is None:
            return None
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            rules = self._slots.get(slot)
            if rules is not None and rules.spec.structured_outputs is not None:
                rows.setdefault(slot, []).append(row)
        asked = {
            slot: self._grammars.ask(slot, [drafts[row].tolist() for row in own])
            for slot, own in rows.items()
        }
        found: list[tuple[int, NDArray[np.uint8]]] = []
        for slot, own in rows.items():
            try:
                masks = self._grammars.answer(asked[slot])
            except (TimeoutError, ValueError) as error:
                # Too slow; or behind a row that gave no token: the request has failed.
                logger.warning("the grammar of slot %d cannot be applied: %s", slot, error)
                self.fail(slot)
            except Exception:
                logger.exception("the grammar of slot %d cannot be applied", slot)
                self.fail(slot)
            else:
                found += [(row, bits) for row, bits in zip(own, masks, strict=True) if bits is not None]
        if not found:
            return None
        return TokenMasks(
            row=self._rows([row for row, _ in found]),
            bits=self._boundary.up(np.stack([bits for _, bits in found])),
            first_bit=self._grammars.first_bit,
        )

    def _release(self, slot: int) -> None:
        self._failed.discard(slot)
        if self._grammars is not None:
            self._grammars.release(slot)
        old = self._slots.pop(slot, None)
        if old is not None and old.lane is not None:
            self._counts.give_back(old.lane)

    def _penalties(self, rows: list[tuple[int, _Slot]], drafts: list[Int64s]) -> Penalties:
        lanes = self._boundary.up(np.array([rules.lane for _, rules in rows], np.int64))
        counts = self._counts.completion[lanes]
        before = [drafts[row] for row, _ in rows]
        columns, own = self._columns(np.concatenate(before))
        entry = np.repeat(np.arange(len(rows)), [len(d) for d in before])[own]
        flat = self._boundary.up(entry * self._slice_size + columns)
        counts.view(-1).index_add_(0, flat, counts.new_ones(len(flat)))
        return Penalties(
            row=self._rows([row for row, _ in rows]),
            repetition=self._values([rules.spec.repetition_penalty for _, rules in rows]),
            frequency=self._values([rules.spec.frequency_penalty for _, rules in rows]),
            presence=self._values([rules.spec.presence_penalty for _, rules in rows]),
            counts=counts,
            in_prompt=self._counts.in_prompt[lanes],
        )

    def _entries(self, rows: list[tuple[int, Int64s]]) -> Entries | None:
        columns = np.concatenate([c for _, c in rows]) if rows else _NO_TOKENS
        if len(columns) == 0:
            return None
        row = np.repeat([row for row, _ in rows], [len(c) for _, c in rows])
        return Entries(row=self._boundary.up(row), column=self._boundary.up(columns))

    def _rows(self, rows: list[int]) -> Tensor:
        return self._boundary.up(np.array(rows, np.int64))

    def _values(self, values: list[float]) -> Tensor:
        return self._boundary.up(np.array(values, np.float64))

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
