"""argmax(s + gumbel) over a slice of the vocabulary, as the exponential race that it is.

    argmax(s_i + g_i), g_i = -log E_i   ==   argmin(E_i / w_i), w_i = exp(s_i - max s), E_i = -log(1 - v_i)

Two logarithms and their float64 operands per token would cost as much as the random bits. But v <= E, so
v_i / w_i bounds a token's arrival from below; and where rho is the smallest such ratio of a row, its token
arrives by -log(1 - rho) at the latest, since w <= 1 and -log(1 - rho w) / w grows with w. Tokens whose
ratio is above that cannot win. One or two per row remain; they alone are compared by s + g in float64, so
the elimination decides nothing: it only has to be safe, and its slack covers float32.

Leaving out tokens too far below the best (MAX_GUMBEL - MIN_GUMBEL = 26) before the random bits does not
pay: on the bundled checkpoint 97 % of the tokens lie within that at temperature 1, and 77 %, in 92 % of the
blocks of four, at 0.7.

In a process of the native backend compiled code does the same: 4 rows of 6144 take an eighth of the time.

Shape legend: R rows, V tokens of the slice, K tokens that may win.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_integration.native.library import loaded
from kernels_integration.noise import gumbel, random_bits, uniform
from kernels_integration.philox import Purpose

_TOKENS_AT_ONCE = 1 << 18  # bounds the memory of a large batch
_SLACK = 1e-4


class Scores(NamedTuple):
    """s + gumbel, exactly: the float64 sum and what it lost by rounding. Compared in this order.

    A logit of 2^50 would swallow the noise: tokens that tie there would be told apart on one rank and not
    between ranks.
    """

    value: Tensor
    rest: Tensor

    @classmethod
    def of(cls, s: Tensor, noise: Tensor) -> "Scores":
        """s: float64 without +inf. (Knuth's two-sum: exact for any two numbers.)"""
        value = s + noise
        noise_part = value - s
        rest = (s - (value - noise_part)) + (noise - noise_part)
        return cls(value, rest.masked_fill_(~value.isfinite(), 0.0))

    @classmethod
    def plain(cls, value: Tensor) -> "Scores":
        """Of logits without noise."""
        return cls(value, torch.zeros_like(value))

    def best(self, token: Tensor, dim: int = 0) -> tuple["Scores", Tensor]:
        """The best over a dimension, and its token, ties to the lower; NaN wins."""
        value = self.value.amax(dim=dim, keepdim=True)
        rest = self.rest.masked_fill(self.value != value, -torch.inf).amax(dim=dim, keepdim=True)
        lost = (self.value != value) | (self.rest != rest)
        tokens = token.masked_fill(lost, torch.iinfo(torch.int64).max).amin(dim=dim)
        return Scores(value.squeeze(dim), rest.squeeze(dim)), tokens


def gumbel_max(
    scaled: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose = Purpose.COUPLED
) -> tuple[Scores, Tensor]:
    """([R] best s + gumbel, [R] int64 its token id); equal scores: the lower id.

    scaled: [R, V] float32 or float64 without +inf; seed, position: [R] int64. A row of -inf alone scores
    -inf, one with a NaN scores NaN.
    """
    num_rows, count = scaled.shape
    columns_at_once = min(count, _TOKENS_AT_ONCE)
    rows_at_once = max(1, _TOKENS_AT_ONCE // columns_at_once)
    scores, tokens = [], []
    for row in range(0, num_rows, rows_at_once):
        part = slice(row, row + rows_at_once)
        first = scaled[part, :columns_at_once]
        score, token = _gumbel_max(first, vocab_start, seed[part], position[part], purpose)
        for column in range(columns_at_once, count, columns_at_once):
            columns = scaled[part, column : column + columns_at_once]
            later_score, later_token = _gumbel_max(
                columns, vocab_start + column, seed[part], position[part], purpose
            )
            both = Scores(*map(torch.stack, zip(score, later_score, strict=True)))
            score, token = both.best(torch.stack((token, later_token)))
        scores.append(score)
        tokens.append(token)
    return Scores(*map(torch.cat, zip(*scores, strict=True))), torch.cat(tokens)


def _gumbel_max(
    scaled: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose
) -> tuple[Scores, Tensor]:
    compiled = _compiled(scaled, vocab_start, seed, position, purpose)
    if compiled is not None:
        return compiled
    bits = random_bits(seed, position, vocab_start, scaled.shape[1], purpose)
    peak = scaled.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(scaled.dtype).min)
    weight = (scaled - peak).exp_()
    ratio = uniform(bits, scaled.dtype).div_(weight)
    rho = ratio.amin(dim=1, keepdim=True).double().mul_(1 + _SLACK).clamp_(max=1.0)
    latest = rho.neg_().log1p_().neg_().mul_(1 + _SLACK)
    row, column = (ratio <= latest.to(scaled.dtype)).nonzero(as_tuple=True)
    score = Scores.of(scaled[row, column].double(), gumbel(bits[row, column]))
    best, token = best_per_row(row, score, column + vocab_start, scaled.shape[0])
    best.value.masked_fill_(peak.squeeze(1).isnan(), torch.nan)
    return best, token


def _compiled(
    scaled: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose
) -> tuple[Scores, Tensor] | None:
    """The same by compiled code; None where there is none, for another dtype, and where a row holds NaN."""
    kernels = loaded() if scaled.device.type == "cpu" and scaled.dtype is torch.float32 else None
    if kernels is None:
        return None
    num_rows, count = scaled.shape
    scaled, seed, position = scaled.contiguous(), seed.contiguous(), position.contiguous()
    score = torch.empty(2, num_rows, dtype=torch.float64)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    value, rest = score.unbind()
    failed = kernels.gumbel_max(
        *(scaled.data_ptr(), num_rows, count, vocab_start, seed.data_ptr(), position.data_ptr()),
        *(int(purpose), _SLACK, value.data_ptr(), rest.data_ptr(), tokens.data_ptr()),
    )
    return None if failed else (Scores(value, rest), tokens)


def best_per_row(row: Tensor, score: Scores, token: Tensor, num_rows: int) -> tuple[Scores, Tensor]:
    """([num_rows] best score, [num_rows] its token, ties to the lower) of flat (row, score, token) [K]."""
    value = torch.full((num_rows,), -torch.inf, dtype=score.value.dtype, device=row.device)
    value.scatter_reduce_(0, row, score.value, "amax")
    leads = score.value == value[row]
    rest = torch.full_like(value, -torch.inf)
    rest.scatter_reduce_(0, row[leads], score.rest[leads], "amax")
    won = leads & (score.rest == rest[row])
    tokens = torch.full((num_rows,), torch.iinfo(torch.int64).max, device=row.device)
    tokens.scatter_reduce_(0, row[won], token[won], "amin")
    return Scores(value, rest), tokens
