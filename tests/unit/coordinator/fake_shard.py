"""A shard without tensors: it keeps who wrote every KV slot, at which position and which token.

Its target is a function of the tokens that it *reads back* through block tables, so a stale, missing or
foreign slot is noticed at once, and a lost token changes the stream. All DCP ranks are emulated.
"""

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


def target_token(state: int) -> int:
    """The target's own next token after this state."""
    return hash((state, "target")) % VOCAB


def oracle(state: int) -> int:
    return target_token(state)


def anti_oracle(state: int) -> int:
    return (target_token(state) + 1) % VOCAB


def sometimes_right(state: int) -> int:
    return target_token(state) if hash((state, "draft")) % 3 else anti_oracle(state)


@dataclass
class _Slot:
    """What a shard keeps for one state slot."""

    admission: Admission
    table: list[int] = field(default_factory=list)
    carried: int | None = None
    """State of the last chunk row."""
    computed: int = 0
    """Tokens whose target KV is written and accepted."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of the last token step, which the next verify must bring back as `accepted`."""
    pending: list[tuple[int, int, int | None]] = field(default_factory=list)
    """(MTP slot, target state before it, its token once known), oldest first."""
    mtp_from: int = 1


class FakeShard:
    """Every rank of a group at once. Raises AssertionError for anything that a shard could not execute."""

    def __init__(self, config: GroupConfig, draft=sometimes_right) -> None:
        self.config = config
        self.draft = draft
        self.slots: dict[int, _Slot] = {}
        self.latent: dict[tuple[int, int], tuple[int, int, int]] = {}
        """(rank, local slot) -> (admission, position, token)"""
        self.mtp: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        """(rank, local slot) -> (admission, position, token, state before it)"""
        self.num_proposed = 0
        self.num_accepted = 0
        self.num_skipped_fills = 0
        self.last_step = 0

    def lose_state(self) -> None:
        """What a restart does."""
        self.slots, self.latent, self.mtp = {}, {}, {}

    def execute(self, step: StepInput) -> StepOutput:
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

        drafts = [self._fill_and_draft(slots[i], step, i, accepted[i]) for i in range(num)]
        # The target: all rows write, then all rows read.
        rows: list[list[int]] = []
        for i, slot in enumerate(slots):
            verify = step.kind[i] == RowKind.VERIFY
            rows.append([accepted[i][-1], *drafts[i]] if verify else ids[i])
            for position, token in enumerate(rows[i], int(step.start[i])):
                assert position <= slot.admission.limit - 2, "a row beyond the limit"
                self._write(self.latent, slot, position, (token,))
        tokens: list[int] = []
        asked: list[int] = []
        asked_of_prompts: list[int] = []
        lengths: list[int] = []
        for i, slot in enumerate(slots):
            states = self._read_states(slot, int(step.start[i]) + len(rows[i]))
            after_rows = states[int(step.start[i]) :]
            num_before = len(tokens)
            match step.kind[i]:
                case RowKind.VERIFY:
                    own = [target_token(s) for s in after_rows]
                    tokens += own
                    self._accept(slot, int(step.start[i]), after_rows, drafts[i], own)
                case RowKind.FINAL_CHUNK:
                    own = [target_token(after_rows[-1])]
                    tokens += own
                    slot.computed = int(step.start[i]) + len(rows[i])
                    slot.emitted = own
                    slot.pending = [(slot.computed, after_rows[-1], None)]
                case RowKind.MIDDLE_CHUNK:
                    slot.computed = int(step.start[i]) + len(rows[i])
            lengths.append(slot.computed)
            spec, prompt_len = slot.admission.sampling, slot.admission.prompt_len
            if spec.num_logprobs >= 0:
                asked += tokens[num_before:]
            if spec.num_prompt_logprobs >= 0 and step.kind[i] != RowKind.VERIFY:
                assert len(slot.admission.history) >= prompt_len
                end = min(slot.computed + 1, prompt_len)
                asked_of_prompts += slot.admission.history[int(step.start[i]) + 1 : end].tolist()
        for i, slot in enumerate(slots):
            if step.kind[i] != RowKind.VERIFY:
                self._prompt_fill(slot, int(step.start[i]), ids[i])
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

    def _fill_and_draft(self, slot: _Slot, step: StepInput, i: int, accepted: list[int]) -> list[int]:
        """The MTP layer over the pending rows, then k - 1 single rows."""
        if step.kind[i] != RowKind.VERIFY:
            assert not accepted
            assert step.start[i] == slot.computed, "a chunk must go on where the last one ended"
            return []
        assert accepted == slot.emitted, "the accepted tokens differ from what the shard emitted"
        anchor = int(step.start[i])
        assert anchor == slot.computed
        known = [p for p in slot.pending if p[2] is not None]
        new = [p for p in slot.pending if p[2] is None]
        slot.pending = known + [(p, state, token) for (p, state, _), token in zip(new, accepted, strict=True)]
        assert slot.pending[-1][0] == anchor
        if len(slot.pending) > MAX_PENDING:
            slot.pending = slot.pending[-MAX_PENDING:]
            slot.mtp_from = slot.pending[0][0]
            self.num_skipped_fills += 1
        if not step.fill[i]:
            return []
        for position, state, token in slot.pending:
            self._write(self.mtp, slot, position, (token, state))
        for position in range(slot.mtp_from, anchor + 1):
            entry = self.mtp.get(self._address(slot, position))
            assert entry is not None, f"MTP slot of position {position} was never written"
            assert entry[:2] == (slot.admission.admission, position), "stale or foreign MTP slot"
            assert target_token(entry[3]) == entry[2] or position < slot.admission.prompt_len
        state = advance(*slot.pending[-1][1:])
        slot.pending = []
        drafts: list[int] = []
        for j in range(int(step.k[i])):
            drafts.append(self.draft(state))
            if j + 1 < step.k[i]:  # the next draft's row, in slot anchor + j + 1
                self._write(self.mtp, slot, anchor + j + 1, (drafts[-1], state))
            state = advance(state, drafts[-1])
        return drafts

    def _accept(self, slot: _Slot, start: int, states: list[int], drafts: list[int], own: list[int]) -> None:
        """mtp.md 4, written anew: the longest prefix of drafts that are the target's own, and one more."""
        num_accepted = next((i for i, d in enumerate(drafts) if d != own[i]), len(drafts))
        self.num_proposed += len(drafts)
        self.num_accepted += num_accepted
        slot.emitted = own[: num_accepted + 1]
        slot.computed = start + num_accepted + 1
        slot.pending += [(start + 1 + i, states[i], None) for i in range(num_accepted + 1)]

    def _prompt_fill(self, slot: _Slot, start: int, ids: list[int]) -> None:
        """After the report: MTP slots of this step's chunk rows; slot 0 is never written."""
        state = slot.admission.seed if start == 0 else slot.carried
        for position, token in enumerate(ids, start):
            if position > 0:
                self._write(self.mtp, slot, position, (token, state))
            state = advance(state, token)
        slot.carried = state

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

    def _write(self, cache: dict, slot: _Slot, position: int, value: tuple) -> None:
        cache[self._address(slot, position)] = (slot.admission.admission, position, *value)

    def _read_states(self, slot: _Slot, length: int) -> list[int]:
        """The states after each of the first `length` tokens, read through the table."""
        states: list[int] = []
        state = slot.admission.seed
        for position in range(length):
            entry = self.latent.get(self._address(slot, position))
            assert entry is not None, f"position {position} was never written"
            assert entry[:2] == (slot.admission.admission, position), "stale or foreign slot"
            state = advance(state, entry[2])
            states.append(state)
        return states


def stream(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """The target's completion of a prompt, one token at a time."""
    state = seed
    for token in prompt:
        state = advance(state, token)
    completion: list[int] = []
    for _ in range(num_tokens):
        completion.append(target_token(state))
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
