"""Standard rejection sampling over a sharded vocabulary: accept a draft with probability min(1, p/q).

A draft d is drawn from q, its own filtered distribution. It is accepted where u < p(d) / q(d); otherwise a
sample of max(p - q, 0), normalised, takes its place. What is emitted then has the distribution p.
Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). Every choice has
random words of its own (`Purpose`): sharing them would bias the result.

Shape legend: R rows, V tokens of this rank's slice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_integration.collectives import Collectives
from kernels_integration.filters import surviving
from kernels_integration.gumbel_max import Scores, gumbel_max
from kernels_integration.philox import Purpose
from kernels_integration.ranking import row_max
from kernels_integration.sampling import (
    GREEDY_BELOW,
    SamplingRows,
    best_of_ranks,
    over_temperature,
    without_nan,
)


def probabilities(local_logits: Tensor, vocab_start: int, rows: SamplingRows, comm: Collectives) -> Tensor:
    """[R, V] float64: this rank's slice of the distribution that each row draws from. Collective.

    After rules, temperature and filters; all on the best token where a row is greedy; NaN, on every rank, in
    a row that can draw nothing. Arguments as for `sampling.sample`.
    """
    if not len(local_logits):  # a step of middle chunks draws nothing
        return local_logits.double()
    logits = without_nan(local_logits)
    if rows.rules is not None:
        logits = rows.rules.apply(logits)
    greedy = (rows.temperature < GREEDY_BELOW) | (rows.top_k == 1)
    scaled = over_temperature(logits, rows.temperature.masked_fill(greedy, 1.0))
    weights = _weights(scaled, comm)
    filtered = (rows.cuts().active(comm.size * logits.shape[1]) & ~greedy).nonzero().squeeze(1)
    if len(filtered):
        kept = surviving(scaled[filtered], vocab_start, rows.cuts().select(filtered), comm)
        mask = _slice_mask(filtered[kept.row], kept.token - vocab_start, weights.shape)
        weights[filtered] = weights[filtered].masked_fill_(~mask[filtered], 0.0)
    best = greedy.nonzero().squeeze(1)
    if len(best):
        value, column = row_max(logits[best])
        token = best_of_ranks(Scores.plain(value.double()), column + vocab_start, comm)
        weights[best] = _slice_mask(best, token - vocab_start, weights.shape)[best].double()
    # Added in rank order: the same bits on every rank.
    total = comm.all_gather(weights.sum(dim=1)).sum(dim=0)
    return weights.div_(total.unsqueeze(1))


def draw(
    probability: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose, comm: Collectives
) -> Tensor:
    """[R] int64 tokens of (not necessarily normalised) probabilities [R, V]; NO_TOKEN of NaN. Collective."""
    if not len(probability):
        return torch.empty(0, dtype=torch.int64, device=probability.device)
    return best_of_ranks(*gumbel_max(probability.log(), vocab_start, seed, position, purpose), comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What decides about drafts; the same on every rank."""

    ratio: Tensor
    """[R] float32: p(d) / q(d). Compared with a uniform of 24 bits, which float32 holds exactly."""
    residual: Tensor
    """[R] int64: what is emitted in the draft's place if it is not accepted."""


def rejection_of(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    vocab_start: int,
    seed: Tensor,
    position: Tensor,
    comm: Collectives,
) -> Rejection:
    """Drafts `tokens` [R], drawn from `draft` [R, V], where the target has `target` [R, V]. Collective.

    A draft that `draft` gives no probability is not accepted; a row of the target that can draw nothing (NaN)
    accepts none, and its residual is NO_TOKEN.
    """
    num_rows, slice_size = target.shape
    if not num_rows:
        none = torch.empty(0, dtype=torch.int64, device=target.device)
        return Rejection(ratio=none.float(), residual=none)
    column = tokens - vocab_start
    own = (column >= 0) & (column < slice_size)
    index = column.clamp(0, slice_size - 1).unsqueeze(1)
    pair = torch.cat((target.gather(1, index), draft.gather(1, index)), dim=1).masked_fill_(~own[:, None], 0)
    left = (target - draft).clamp_(min=0)
    gathered = comm.all_gather(torch.cat((pair, left.amax(dim=1, keepdim=True)), dim=1))  # [W, R, 3]
    (p, q), most = gathered[..., :2].sum(dim=0).unbind(1), gathered[..., 2].amax(dim=0)
    # Where p and q are equal the draft is always accepted; any legal row serves as its residual.
    left = torch.where(most.unsqueeze(1) > 0, left, target)
    return Rejection(
        ratio=torch.where((q > 0) & (p >= 0), p / q, 0).float(),
        residual=draw(left, vocab_start, seed, position, Purpose.RESIDUAL, comm),
    )


def _weights(scaled: Tensor, comm: Collectives) -> Tensor:
    """[R, V] float64 exp(s - max s) with the maximum of all ranks."""
    peak = comm.all_gather(scaled.amax(dim=1).double()).amax(dim=0)
    return (scaled.double() - peak.unsqueeze(1)).exp_()


def _slice_mask(row: Tensor, column: Tensor, shape: torch.Size) -> Tensor:
    """Bool of `shape`, true at the (row, column) pairs that lie in this slice."""
    own = (column >= 0) & (column < shape[1])
    mask = torch.zeros(shape, dtype=torch.bool, device=row.device)
    mask[row[own], column[own]] = True
    return mask
