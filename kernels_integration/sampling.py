"""Draw one token per row from logits whose vocabulary is sharded over the ranks.

A row's token is argmax(logits / temperature + gumbel(seed, position, token)) over what min-p, top-k and top-p
leave of the logits that its rules have edited: a pure function of the row. It is the same alone or in any
batch and for any number of ranks, and target and draft that are given the same seed and position share their
noise, which is what couples them.

Shape legend: R rows, V tokens of this rank's slice (padding columns -inf), W ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_integration.collectives import Collectives
from kernels_integration.filters import Cuts, surviving
from kernels_integration.gumbel_max import Scores, best_per_row, gumbel_max
from kernels_integration.logit_rules import LogitRules
from kernels_integration.logprobs import Logprobs, logprobs_of
from kernels_integration.noise import gumbel, random_bits_at
from kernels_integration.ranking import row_max
from kernels_integration.token_marks import NO_TOKEN

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM: dividing by it may overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How each of R rows draws its token."""

    temperature: Tensor
    """[R] float; below GREEDY_BELOW: the best token, ties to the lower id."""
    top_k: Tensor
    """[R] int64; 0 or at least the vocabulary: off."""
    top_p: Tensor
    """[R] float in [0, 1]; 1: off. The best token stays, whatever is left of a tiny value."""
    min_p: Tensor
    """[R] float in [0, 1]; 0: off."""
    seed: Tensor
    """[R] int64: the bit pattern of the uint64 seed."""
    position: Tensor
    """[R] int64: index, in prompt + completion, of the token being drawn."""
    rules: LogitRules | None = None
    """Penalties, bias and bans of the rows that have some."""
    num_logprobs: int = -1
    """-1: none; n >= 0: the chosen token's log probability and the n best."""
    logprob_rows: Tensor | None = None
    """[L] int64: the rows that num_logprobs is for; None: all."""

    def cuts(self) -> Cuts:
        return Cuts(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The same on every rank."""

    tokens: Tensor
    """[R] int64; NO_TOKEN in rows without a finite logit."""
    logprobs: Logprobs | None
    """Of the rows asked for, in order."""


def sample(local_logits: Tensor, vocab_start: int, rows: SamplingRows, comm: Collectives) -> Sampled:
    """One token per row. Collective: every rank calls it with the same rows and its own slice.

    local_logits: [R, V] float32 or float64, not written; V the same on all ranks, and rank r + 1's slice lies
    above rank r's. Logits are edited and divided by the temperature in their own dtype; scores, cuts and log
    probabilities are float64. Log probabilities are those of the unedited logits.

    NaN and +inf are no number a model can mean: they count as -inf, as padding does, and are never chosen. A
    row that has no other entry, or whose rules failed on some rank, gives NO_TOKEN on every rank, and no
    other row notices. What leaves the dtype's range by rules or a low temperature stays at its end.
    """
    num_rows = local_logits.shape[0]
    if num_rows == 0:
        tokens = torch.empty(0, dtype=torch.int64, device=local_logits.device)
    else:
        local_logits = without_nan(local_logits)
        edited = local_logits if rows.rules is None else rows.rules.apply(local_logits)
        tokens = _draw(edited, vocab_start, rows, comm)
    return Sampled(tokens=tokens, logprobs=_logprobs(local_logits, vocab_start, tokens, rows, comm))


def _logprobs(
    logits: Tensor, vocab_start: int, tokens: Tensor, rows: SamplingRows, comm: Collectives
) -> Logprobs | None:
    if rows.num_logprobs < 0:
        return None
    if rows.logprob_rows is not None and len(rows.logprob_rows) < len(tokens):
        logits, tokens = logits[rows.logprob_rows], tokens[rows.logprob_rows]
    return logprobs_of(logits, vocab_start, tokens, rows.num_logprobs, comm)


def _draw(logits: Tensor, vocab_start: int, rows: SamplingRows, comm: Collectives) -> Tensor:
    # The best of one kept token needs no noise.
    greedy = (rows.temperature < GREEDY_BELOW) | (rows.top_k == 1)
    if bool(greedy.all()):
        value, column = row_max(logits)
        return best_of_ranks(Scores.plain(value.double()), column + vocab_start, comm)

    filtered = rows.cuts().active(comm.size * logits.shape[1]) & ~greedy
    if not bool((greedy | filtered).any()):
        scaled = over_temperature(logits, rows.temperature)
        return best_of_ranks(*gumbel_max(scaled, vocab_start, rows.seed, rows.position), comm)
    tokens = torch.empty_like(rows.seed)
    whole = (~filtered).nonzero().squeeze(1)
    if len(whole):
        tokens[whole] = _draw_unfiltered(logits, vocab_start, rows, greedy, whole, comm)
    cut = filtered.nonzero().squeeze(1)
    if len(cut):
        tokens[cut] = _draw_filtered(logits, vocab_start, rows, cut, comm)
    return tokens


def _draw_unfiltered(
    logits: Tensor, vocab_start: int, rows: SamplingRows, greedy: Tensor, index: Tensor, comm: Collectives
) -> Tensor:
    """Rows `index`: greedy ones and those with a temperature alone. [len(index)] tokens."""
    score = Scores.plain(torch.zeros(len(index), dtype=torch.float64, device=logits.device))
    token = torch.empty_like(index)
    plain = greedy[index].nonzero().squeeze(1)
    if len(plain):
        best, column = row_max(logits[index[plain]])
        score.value[plain], token[plain] = best.double(), column + vocab_start
    noisy = (~greedy[index]).nonzero().squeeze(1)
    if len(noisy):
        row = index[noisy]
        scaled = _scaled(logits, rows, row)
        drawn, token[noisy] = gumbel_max(scaled, vocab_start, rows.seed[row], rows.position[row])
        score.value[noisy], score.rest[noisy] = drawn
    return best_of_ranks(score, token, comm)


def _draw_filtered(
    logits: Tensor, vocab_start: int, rows: SamplingRows, index: Tensor, comm: Collectives
) -> Tensor:
    """Rows `index`: every rank gets all survivors and draws for itself. [len(index)] tokens."""
    scaled = _scaled(logits, rows, index)
    kept = surviving(scaled, vocab_start, rows.cuts().select(index), comm)
    row = index[kept.row]
    noise = gumbel(random_bits_at(rows.seed[row], rows.position[row], kept.token))
    best, tokens = best_per_row(kept.row, Scores.of(kept.value, noise), kept.token, len(index))
    return _or_no_token(tokens, best.value)


def _scaled(logits: Tensor, rows: SamplingRows, index: Tensor) -> Tensor:
    part = logits if len(index) == logits.shape[0] else logits[index]
    return over_temperature(part, rows.temperature[index])


def over_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] logits / temperature [R], in the logits' dtype; at most its greatest number, which ties."""
    scaled = logits / temperature.to(logits.dtype).unsqueeze(1)
    return scaled.clamp_(max=torch.finfo(logits.dtype).max)


def best_of_ranks(score: Scores, token: Tensor, comm: Collectives) -> Tensor:
    """[R] token of the greatest score over all ranks, ties to the lower id; score, token: [R].

    NO_TOKEN where that is -inf, or NaN on some rank.
    """
    if comm.size > 1:
        # One message: the float64s' bits beside the id.
        words = (score.value.view(torch.int64), score.rest.view(torch.int64), token)
        values, rests, tokens = comm.all_gather(torch.stack(words)).unbind(1)  # [W, R] each
        score, token = Scores(
            values.contiguous().view(torch.float64), rests.contiguous().view(torch.float64)
        ).best(tokens)
    return _or_no_token(token, score.value)


def without_nan(logits: Tensor) -> Tensor:
    """logits with -inf for NaN and +inf; the same tensor where there are none."""
    # One reduction finds both NaN (which it returns) and +inf.
    if float(logits.amax()) < torch.inf:
        return logits
    return logits.masked_fill(~(logits < torch.inf), -torch.inf)


def _or_no_token(token: Tensor, value: Tensor) -> Tensor:
    return token.masked_fill(~(value > -torch.inf), NO_TOKEN)
