"""A shard without tensors: it keeps who wrote every KV slot, at which position and which token.

Its target is a function of the tokens that it *reads back* through block tables, so a stale, missing or
foreign slot is noticed at once, and a lost token changes the stream. Only what an admission found in the
prefix cache may be another's, and then every token before it must be the same. All DCP ranks are emulated.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from actors.config import GroupConfig
from actors.messages import Admission, RowKind, StepInput, StepOutput, TokenLogprobs

VOCAB = 97
MAX_PENDING = 32


def advance(state: int, token: int) -> int:
    """The hidden state after one more token."""
    return hash((state, token))


def target_token(state: int, seed: int) -> int:
    """The target's own next token after this state, drawn with this seed."""
    return hash((state, seed, "target")) % VOCAB


def oracle(state: int, seed: int) -> int:
    return target_token(state, seed)


def anti_oracle(state: int, seed: int) -> int:
    return (target_token(state, seed) + 1) % VOCAB


def sometimes_right(state: int, seed: int) -> int:
    return target_token(state, seed) if hash((state, "draft")) % 3 else anti_oracle(state, seed)


@dataclass
class _Slot:
    """What a shard keeps for one state slot."""

    admission: Admission
    table: list[int] = field(default_factory=list)
    carried: int | None = None
    """State of the last chunk row."""
    num_hit: int | None = None
    """Tokens found in the prefix cache; None before the first chunk."""
    computed: int = 0
    """Tokens whose target KV is written and accepted."""
    anchor: int | None = None
    """The last token emitted; none before the final chunk."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of the last token step; a verify that brings `accepted` must bring these."""
    pending: list[tuple[int, int, int]] = field(default_factory=list)
    """(MTP slot, target state before it, its token), oldest first."""
    fell_out: bool = False
    mtp_from: int = 1


class FakeShard:
    """Every rank of a group at once. Raises AssertionError for anything that a shard could not execute."""

    def __init__(self, config: GroupConfig, draft=sometimes_right) -> None:
        self.config = config
        self.draft = draft
        self.slots: dict[int, _Slot] = {}
        self.latent: dict[tuple[int, int], list] = {}
        """(rank, local slot) -> [admission, position, token, state before it or None]"""
        self.mtp: dict[tuple[int, int], list] = {}
        """The same."""
        self.published: set[int] = set()
        """Blocks that may not be written in this step."""
        self.num_hits = 0
        self.num_masked = 0
        self.num_proposed = 0
        self.num_accepted = 0
        self.num_skipped_fills = 0
        self.last_step = 0

    def lose_state(self) -> None:
        """What a restart does."""
        self.slots, self.latent, self.mtp = {}, {}, {}

    def execute(self, step: StepInput, published: Iterable[int] = ()) -> StepOutput:
        self.published = set(published)
        assert step.step == self.last_step + 1
        self.last_step = step.step
        self._check_shape(step)
        for admission in step.admit:
            assert 0 <= admission.slot < self.config.max_num_seqs
            self.slots[admission.slot] = _Slot(admission)
        num = len(step.slot)
        slots = [self.slots[s] for s in step.slot.tolist()]
        for i, slot in enumerate(slots):
            assert slot.admission.admission == step.admission[i], "rows under an unknown admission"
            slot.table += step.new_blocks[step.new_blocks_indptr[i] : step.new_blocks_indptr[i + 1]].tolist()
        accepted = [step.accepted[a:b].tolist() for a, b in _spans(step.accepted_indptr)]
        ids = [step.ids[a:b].tolist() for a, b in _spans(step.ids_indptr)]
        verifies = [bool(kind == RowKind.VERIFY) for kind in step.kind.tolist()]
        for i, slot in enumerate(slots):
            if verifies[i]:
                self._check_verify(slot, int(step.start[i]), accepted[i])
            else:
                self._check_chunk(slot, int(step.start[i]), int(step.readonly[i]), ids[i], accepted[i])
        starts = [slot.computed for slot in slots]

        drafts = [self._fill_and_draft(slots[i], step, i) if verifies[i] else [] for i in range(num)]
        # The target: all rows write, then all rows read.
        rows: list[list[int]] = []
        for i, slot in enumerate(slots):
            rows.append([slot.anchor, *drafts[i]] if verifies[i] else ids[i])
            for position, token in enumerate(rows[i], starts[i]):
                if position > slot.admission.limit - 2:
                    assert step.start[i] == -1, "a row beyond the limit"
                elif position >= starts[i] + int(step.readonly[i]):
                    self._write(self.latent, slot, position, token, None)
        tokens: list[int] = []
        asked: list[int] = []
        asked_of_prompts: list[int] = []
        lengths: list[int] = []
        for i, slot in enumerate(slots):
            num_before = len(tokens)
            seed, end = slot.admission.seed, starts[i] + len(rows[i])
            readable = min(end, slot.admission.limit - 1)
            read, states = self._read(slot, readable)
            after_rows = states[starts[i] :]
            assert read[starts[i] :] == rows[i][: readable - starts[i]]
            if verifies[i]:
                own = [target_token(s, seed) for s in after_rows] + [-1] * (end - max(readable, starts[i]))
                self.num_masked += own.count(-1)
                tokens += own
                self._accept(slot, after_rows, drafts[i], own)
            else:
                slot.computed = end
                if step.kind[i] == RowKind.FINAL_CHUNK:
                    slot.emitted = [target_token(after_rows[-1], seed)]
                    slot.anchor = slot.emitted[-1]
                    tokens += slot.emitted
                    slot.pending = [(end, after_rows[-1], slot.anchor)]
            lengths.append(slot.computed)
            spec, prompt_len = slot.admission.sampling, slot.admission.prompt_len
            if spec.num_logprobs >= 0:
                asked += tokens[num_before:]
            if spec.num_prompt_logprobs >= 0 and step.kind[i] != RowKind.VERIFY:
                assert len(slot.admission.history) >= prompt_len
                end = min(slot.computed + 1, prompt_len)
                asked_of_prompts += slot.admission.history[int(step.start[i]) + 1 : end].tolist()
        for i, slot in enumerate(slots):
            if not verifies[i] and self.config.num_speculative_tokens:
                self._prompt_fill(slot, starts[i], int(step.readonly[i]), ids[i])
        return StepOutput(
            epoch=step.epoch,
            step=step.step,
            drafts=np.array([d for ds in drafts for d in ds], np.int32),
            tokens=np.array(tokens, np.int32),
            length=np.array(lengths, np.int32),
            logprobs=_logprobs(asked, max(s.admission.sampling.num_logprobs for s in slots)),
            prompt_logprobs=_logprobs(
                asked_of_prompts, max(s.admission.sampling.num_prompt_logprobs for s in slots)
            ),
        )

    def _check_shape(self, step: StepInput) -> None:
        """The message's own rules, and the group's limits."""
        num = len(step.slot)
        assert 0 < num <= self.config.max_num_seqs
        assert len(set(step.slot.tolist())) == num
        kinds, k = step.kind.tolist(), step.k.tolist()
        num_verifies = kinds.count(RowKind.VERIFY)
        assert all(kind == RowKind.VERIFY for kind in kinds[:num_verifies])
        assert k[:num_verifies] == sorted(k[:num_verifies], reverse=True)
        assert not any(k[num_verifies:])
        assert max(k) <= self.config.num_speculative_tokens
        assert all(bool(f) or n == 0 for f, n in zip(step.fill.tolist(), k, strict=True))
        for name in ("ids", "new_blocks", "accepted"):
            indptr = getattr(step, f"{name}_indptr").tolist()
            assert len(indptr) == num + 1
            assert (indptr[0], indptr[-1]) == (0, len(getattr(step, name)))
            assert indptr == sorted(indptr)
        num_rows = sum(k) + num_verifies + len(step.ids)
        assert num_rows <= self.config.max_num_batched_tokens
        scheduled = set(zip(step.slot.tolist(), step.admission.tolist(), strict=True))
        assert {(a.slot, a.admission) for a in step.admit} <= scheduled

    def _check_verify(self, slot: _Slot, start: int, accepted: list[int]) -> None:
        assert slot.anchor is not None, "a verify before the final chunk"
        if start == -1:
            assert not accepted
        else:
            assert start == slot.computed
            assert accepted == slot.emitted, "the accepted tokens differ from what the shard emitted"

    def _check_chunk(
        self, slot: _Slot, start: int, readonly: int, ids: list[int], accepted: list[int]
    ) -> None:
        assert ids
        assert not accepted
        if slot.num_hit is None:
            assert readonly or not start
            slot.num_hit = start + readonly
            slot.computed = start
            tokens_per_block = self.config.block_size * self.config.decode_context_parallel_size
            assert slot.num_hit % tokens_per_block == 0
            self.num_hits += slot.num_hit > 0
        else:
            assert not readonly
        assert slot.anchor is None
        assert start == slot.computed, "a chunk must go on where the last one ended"

    def _fill_and_draft(self, slot: _Slot, step: StepInput, i: int) -> list[int]:
        """The MTP layer over the pending rows, then k - 1 single rows."""
        anchor, last = slot.computed, slot.admission.limit - 2
        if slot.pending:
            assert slot.pending[-1][0] == anchor
            assert slot.pending[-1][2] == slot.anchor
        if not step.fill[i]:
            return []
        if slot.fell_out:
            slot.mtp_from = slot.pending[0][0]
            self.num_skipped_fills += 1
            slot.fell_out = False
        for position, state, token in slot.pending:
            if position <= last:
                self._write(self.mtp, slot, position, token, state)
        tokens, states = self._read(slot, min(anchor, last + 1))
        tokens.append(slot.anchor)
        for position in range(slot.mtp_from, min(anchor, last) + 1):
            entry = self.mtp.get(self._address(slot, position))
            assert entry is not None, f"MTP slot of position {position} was never written"
            self._check_owner(slot, position, entry)
            assert entry[2:] == [tokens[position], states[position - 1]], "stale or foreign MTP slot"
        state = advance(states[-1], slot.anchor)
        slot.pending = []
        drafts: list[int] = []
        for j in range(int(step.k[i])):
            drafts.append(self.draft(state, slot.admission.seed))
            if j + 1 < step.k[i] and anchor + j + 1 <= last:  # the next draft's row
                self._write(self.mtp, slot, anchor + j + 1, drafts[-1], state)
            state = advance(state, drafts[-1])
        return drafts

    def _accept(self, slot: _Slot, states: list[int], drafts: list[int], own: list[int]) -> None:
        """mtp.md 4, written anew: the longest prefix of drafts that are the target's own, and one more."""
        num_unmasked = len(own) - own.count(-1)
        num_accepted = next((i for i, d in enumerate(drafts) if d != own[i]), len(drafts))
        num_emitted = min(num_accepted + 1, num_unmasked)
        self.num_proposed += max(num_unmasked - 1, 0)
        self.num_accepted += max(num_emitted - 1, 0)
        slot.emitted = own[:num_emitted]
        slot.pending += [(slot.computed + 1 + i, states[i], token) for i, token in enumerate(slot.emitted)]
        if len(slot.pending) > MAX_PENDING:
            slot.pending = slot.pending[-MAX_PENDING:]
            slot.fell_out = True
        slot.computed += num_emitted
        if slot.emitted:
            slot.anchor = slot.emitted[-1]

    def _prompt_fill(self, slot: _Slot, start: int, readonly: int, ids: list[int]) -> None:
        """After the report: MTP slots of this step's chunk rows; slot 0 is never written."""
        _, states = self._read(slot, start + len(ids))
        if start > 0 and not readonly:
            assert slot.carried == states[start - 1], "the state before the chunk was not carried on"
        for position, token in enumerate(ids, start):
            if position >= max(start + readonly, 1):
                self._write(self.mtp, slot, position, token, states[position - 1])
        slot.carried = states[-1]

    def _address(self, slot: _Slot, position: int) -> tuple[int, int]:
        """(rank, local slot) of a global position, by walking the interleave (contracts/dcp.md)."""
        size, interleave = (
            self.config.decode_context_parallel_size,
            self.config.cp_kv_cache_interleave_size,
        )
        entry, offset = divmod(position, self.config.block_size * size)
        assert entry < len(slot.table), f"no block for position {position}"
        block = slot.table[entry]
        assert 0 <= block < self.config.num_kv_blocks
        rank = position // interleave % size
        local = sum(p // interleave % size == rank for p in range(position - offset, position))
        return rank, block * self.config.block_size + local

    def _write(self, cache: dict, slot: _Slot, position: int, token: int, state: int | None) -> None:
        block = slot.table[position // (self.config.block_size * self.config.decode_context_parallel_size)]
        assert block not in self.published, "a published block is written"
        cache[self._address(slot, position)] = [slot.admission.admission, position, token, state]

    def _check_owner(self, slot: _Slot, position: int, entry: list) -> None:
        assert entry[1] == position, "stale or foreign slot"
        assert entry[0] == slot.admission.admission or position < slot.num_hit, "another request's slot"

    def _read(self, slot: _Slot, length: int) -> tuple[list[int], list[int]]:
        """The first `length` tokens and the states after each, read through the table."""
        tokens: list[int] = []
        states: list[int] = []
        state = 0
        for position in range(length):
            entry = self.latent.get(self._address(slot, position))
            assert entry is not None, f"position {position} was never written"
            self._check_owner(slot, position, entry)
            if entry[3] is None and entry[0] == slot.admission.admission:
                entry[3] = state
            assert entry[3] == state, "KV that was computed after other tokens"
            state = advance(state, entry[2])
            tokens.append(entry[2])
            states.append(state)
        return tokens, states


def stream(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """The target's completion of a prompt, one token at a time."""
    state = 0
    for token in prompt:
        state = advance(state, token)
    completion: list[int] = []
    for _ in range(num_tokens):
        completion.append(target_token(state, seed))
        state = advance(state, completion[-1])
    return completion


def _spans(indptr: np.ndarray) -> list[tuple[int, int]]:
    return list(pairwise(indptr.tolist()))


def _logprobs(tokens: list[int], num_top: int) -> TokenLogprobs | None:
    """Values from which a test can tell the row: token t has -t, alternative j of row r has -(r + j)."""
    if num_top < 0:
        return None
    ranks = range(num_top)
    return TokenLogprobs(
        sampled=np.array([-t for t in tokens], np.float32),
        top_ids=np.array([(t + j) % VOCAB for t in tokens for j in ranks], np.int32),
        top_values=np.array([-(t + j) for t in tokens for j in ranks], np.float32),
        num_top=num_top,
    )
