"""The two ways to draw drafts and target tokens: coupled by shared noise, or by rejection sampling."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.acceptance import StandardRejection, standard_tokens
from actors.config import GroupConfig
from actors.shard.boundary import Boundary
from actors.shard.sampling_state import SamplingState
from actors.shard.slot_rules import Preceding
from actors.shard.step_rows import StepRows
from kernels_integration.collectives import Collectives
from kernels_integration.logprobs import Logprobs, logprobs_of
from kernels_integration.philox import Purpose
from kernels_integration.rejection import draw, probabilities, rejection_of
from kernels_integration.sampling import SamplingRows, sample, without_nan
from kernels_integration.token_marks import MASKED

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The next draft of b requests."""

    tokens: Tensor
    """[b] int64"""
    probability: Tensor | None = None
    """[b, V] this rank's slice of what it was drawn from, where the rejection needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """All drafts of a step."""

    tokens: Tensor
    """[sum k] int64, packed by request; on the device."""
    on_host: Int64s
    """The same."""
    probabilities: tuple[Tensor, ...] = ()
    """Of the i-th drafts, [requests with more than i drafts, V]: those of `Draft`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The tokens of a step."""

    tokens: Int64s
    """[M] of every verify row and final chunk, for the rule of actors.acceptance; MASKED where masked."""
    logprobs: Logprobs | None
    """Of the rows that asked."""
    rejection: StandardRejection | None = None
    """What standard rejection sampling came to `tokens` by; the coordinator repeats it."""


class Sampler(Protocol):
    """Draws for one rank; collective, and the same on every rank."""

    def draft(self, logits: Tensor, slots: Int64s, positions: Int64s, before: Tensor) -> Draft:
        """The next draft of each of b requests; before: [b, i] its drafts so far in this step."""
        ...

    def verify(self, logits: Tensor, rows: StepRows, drafts: Drafts) -> Verified:
        """logits: of rows.sampled_rows."""
        ...


def make_sampler(
    config: GroupConfig, state: SamplingState, vocab_start: int, comm: Collectives, boundary: Boundary
) -> Sampler:
    sampler = StandardSampler if draws_by_rejection(config) else CoupledSampler
    return sampler(state, vocab_start, comm, boundary)


def draws_by_rejection(config: GroupConfig) -> bool:
    """Whether drafts are accepted by standard rejection sampling."""
    return config.rejection_sampling == "standard" and config.num_speculative_tokens > 0


class CoupledSampler:
    """Target and draft share their noise: a draft is right when it is the target's own token."""

    def __init__(self, state: SamplingState, vocab_start: int, comm: Collectives, boundary: Boundary) -> None:
        self._state = state
        self._vocab_start = vocab_start
        self._comm = comm
        self._boundary = boundary

    def draft(self, logits: Tensor, slots: Int64s, positions: Int64s, before: Tensor) -> Draft:
        rows = self._state.rows(slots, positions, preceding=_before(before), with_logprobs=False)
        # A draft that cannot be drawn may be any token: the target decides.
        return Draft(tokens=sample(logits, self._vocab_start, rows, self._comm).tokens.clamp_(min=0))

    def verify(self, logits: Tensor, rows: StepRows, drafts: Drafts) -> Verified:
        _, slots, positions = rows.sampled_rows
        sampling = self._state.rows(
            slots, positions, preceding=rows.preceding(drafts.tokens), with_logprobs=True
        )
        sampled = sample(logits, self._vocab_start, sampling, self._comm)
        tokens = self._boundary.down(sampled.tokens)
        return Verified(
            tokens=np.where(positions >= rows.token_limits, MASKED, tokens),
            logprobs=sampled.logprobs,
        )


class StandardSampler:
    """Accept with probability min(1, p/q), else draw from what q left over. Streams depend on k."""

    def __init__(self, state: SamplingState, vocab_start: int, comm: Collectives, boundary: Boundary) -> None:
        self._state = state
        self._vocab_start = vocab_start
        self._comm = comm
        self._boundary = boundary

    def draft(self, logits: Tensor, slots: Int64s, positions: Int64s, before: Tensor) -> Draft:
        rows = self._state.rows(slots, positions, preceding=_before(before), with_logprobs=False)
        probability = probabilities(logits, self._vocab_start, rows, self._comm)
        token = draw(probability, self._vocab_start, rows.seed, rows.position, Purpose.DRAFT, self._comm)
        # A draft that cannot be drawn may be any token: of probability 0, so it is not accepted.
        return Draft(tokens=token.clamp_(min=0), probability=probability.nan_to_num_(nan=0.0))

    def verify(self, logits: Tensor, rows: StepRows, drafts: Drafts) -> Verified:
        up, down = self._boundary.up, self._boundary.down
        _, slots, positions = rows.sampled_rows
        sampling = self._state.rows(
            slots, positions, preceding=rows.preceding(drafts.tokens), with_logprobs=True
        )
        target = probabilities(logits, self._vocab_start, sampling, self._comm)
        last = np.cumsum(rows.token_counts) - 1
        judged = np.delete(np.arange(len(slots)), last)
        judged_rows = up(judged)
        rejection = rejection_of(
            target[judged_rows],
            self._packed(drafts.probabilities, rows, target),
            drafts.tokens,
            self._vocab_start,
            sampling.seed[judged_rows],
            sampling.position[judged_rows],
            self._comm,
        )
        # A request's last token is always a bonus: how many drafts reach beyond it depends on how much the
        # coordinator knew when it chose k, and deferred streams must equal synchronous ones.
        limits = rows.token_limits
        closing = np.flatnonzero(positions[judged] == limits[judged] - 1)
        bonus_rows = np.concatenate([last, judged[closing]])
        bonus = down(self._bonus(target, up(bonus_rows), sampling))
        ratio, residual = down(rejection.ratio), down(rejection.residual)
        ratio[closing], residual[closing] = -1, bonus[len(last) :]
        masked = positions >= limits
        report = StandardRejection(
            ratio=np.where(masked[judged], -1, ratio).astype(np.float32),
            residual=np.where(masked[judged], MASKED, residual).astype(np.int32),
            bonus=np.where(masked[last], MASKED, bonus[: len(last)]).astype(np.int32),
        )
        tokens = standard_tokens(
            drafts.on_host,
            report,
            rows.token_counts - 1,
            seeds=self._state.seeds(slots[last]),
            positions=rows.token_starts,
        )
        return Verified(
            tokens=tokens,
            logprobs=self._logprobs(logits, tokens, sampling.logprob_rows, sampling.num_logprobs),
            rejection=report,
        )

    def _bonus(self, target: Tensor, rows: Tensor, sampling: SamplingRows) -> Tensor:
        """Tokens of rows without a draft to judge."""
        seed, position = sampling.seed[rows], sampling.position[rows]
        return draw(target[rows], self._vocab_start, seed, position, Purpose.BONUS, self._comm)

    def _packed(self, probabilities: tuple[Tensor, ...], rows: StepRows, target: Tensor) -> Tensor:
        """[sum k, V], by request, as the drafts are packed."""
        if not rows.k.any():
            return target[:0]
        by_depth = torch.cat(probabilities)
        first = np.cumsum([0, *(len(part) for part in probabilities[:-1])])
        request = np.repeat(np.arange(rows.num_verifies), rows.k)
        depth = np.arange(len(request)) - np.repeat(np.cumsum(rows.k) - rows.k, rows.k)
        return by_depth[self._boundary.up(first[depth] + request)]

    def _logprobs(
        self, logits: Tensor, tokens: Int64s, asked: Tensor | None, num_top: int
    ) -> Logprobs | None:
        if num_top < 0 or asked is None:
            return None
        chosen = self._boundary.up(np.maximum(tokens, 0))[asked]  # nobody reads those of masked rows
        return logprobs_of(without_nan(logits[asked]), self._vocab_start, chosen, num_top, self._comm)


def _before(drafts: Tensor) -> Preceding:
    num_requests, num_before = drafts.shape
    return Preceding(
        tokens=drafts.flatten(),
        first=np.arange(num_requests) * num_before,
        count=np.full(num_requests, num_before),
    )
