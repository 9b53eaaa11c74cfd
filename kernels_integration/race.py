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

Shape legend: R rows, V tokens of the slice, K tokens that may win.
"""

import torch
from torch import Tensor

from kernels_integration.noise import gumbel, random_bits, uniform
from kernels_integration.philox import Purpose

_TOKENS_AT_ONCE = 1 << 18  # bounds the memory of a large batch
_SLACK = 1e-4


def race(
    scaled: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose = Purpose.COUPLED
) -> tuple[Tensor, Tensor]:
    """([R] float64 best s + gumbel, [R] int64 its token id); equal scores: the lower id.

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
        score, token = _race(first, vocab_start, seed[part], position[part], purpose)
        for column in range(columns_at_once, count, columns_at_once):
            columns = scaled[part, column : column + columns_at_once]
            later_score, later_token = _race(
                columns, vocab_start + column, seed[part], position[part], purpose
            )
            token = torch.where(later_score > score, later_token, token)
            score = torch.maximum(score, later_score)
        scores.append(score)
        tokens.append(token)
    return torch.cat(scores), torch.cat(tokens)


def _race(
    scaled: Tensor, vocab_start: int, seed: Tensor, position: Tensor, purpose: Purpose
) -> tuple[Tensor, Tensor]:
    bits = random_bits(seed, position, vocab_start, scaled.shape[1], purpose)
    peak = scaled.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(scaled.dtype).min)
    weight = (scaled - peak).exp_()
    ratio = uniform(bits, scaled.dtype).div_(weight)
    rho = ratio.amin(dim=1, keepdim=True).double().mul_(1 + _SLACK).clamp_(max=1.0)
    latest = rho.neg_().log1p_().neg_().mul_(1 + _SLACK)
    row, column = (ratio <= latest.to(scaled.dtype)).nonzero(as_tuple=True)
    score = scaled[row, column].double() + gumbel(bits[row, column])
    best, token = best_per_row(row, score, column + vocab_start, scaled.shape[0])
    return best.masked_fill_(peak.squeeze(1).isnan(), torch.nan), token


def best_per_row(row: Tensor, score: Tensor, token: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """([num_rows] best score, [num_rows] its token, ties to the lower) of flat (row, score, token) [K]."""
    best = torch.full((num_rows,), -torch.inf, dtype=score.dtype, device=score.device)
    best.scatter_reduce_(0, row, score, "amax")
    won = score == best[row]
    tokens = torch.full((num_rows,), torch.iinfo(torch.int64).max, device=score.device)
    return best, tokens.scatter_reduce_(0, row[won], token[won], "amin")
