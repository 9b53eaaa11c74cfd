"""Gumbel noise of tokens: a pure function of (seed, position, token).

Shape legend: R rows, V tokens of a slice, K single tokens.

From 32 random bits b: v = (b + 1/2) / 2^32 is uniform on the midpoints of 2^32 cells, E = -log(1 - v)
a standard exponential, gumbel = -log E. All in float64, where v is exact. So gumbel lies in
[MIN_GUMBEL, MAX_GUMBEL] = [-3.14, 22.88], and the noise of a strong candidate (small v) is spaced 2^-32 / v
relative. What 32 bits cannot show: a token of probability below about 1e-10 is drawn too rarely or never, and
a probability p is off by at most about 2^-32 per token that competes.
"""

import math

import torch
from torch import Tensor

from kernels_integration.philox import Purpose, philox4x32, split64

_CELLS = 2.0**32
MAX_GUMBEL = -math.log(-math.log1p(-0.5 / _CELLS))
MIN_GUMBEL = -math.log(-math.log1p(-(_CELLS - 0.5) / _CELLS))


def random_bits(
    seed: Tensor, position: Tensor, vocab_start: int, count: int, purpose: Purpose = Purpose.COUPLED
) -> Tensor:
    """[R, count] int64 in 0..2^32 - 1: the bits of tokens vocab_start..vocab_start + count - 1.

    seed, position: [R] int64 (a seed is the bit pattern of its uint64). vocab_start need not be a multiple
    of 4: the slice is cut out of whole blocks.
    """
    first_block = vocab_start // 4
    num_blocks = -(-(vocab_start + count) // 4) - first_block
    block = torch.arange(first_block, first_block + num_blocks, device=seed.device)
    words = _words(block, seed.unsqueeze(1), position.unsqueeze(1), purpose)
    bits = torch.stack(words, dim=-1).view(seed.shape[0], 4 * num_blocks)
    skipped = vocab_start - 4 * first_block
    return bits[:, skipped : skipped + count]


def random_bits_at(
    seed: Tensor, position: Tensor, token: Tensor, purpose: Purpose = Purpose.COUPLED
) -> Tensor:
    """[K] int64: the bits of single tokens; seed, position, token [K] int64. Equal to random_bits there."""
    words = torch.stack(_words(token // 4, seed, position, purpose), dim=-1)
    return words.gather(-1, (token % 4).unsqueeze(-1)).squeeze(-1)


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential of 32 random bits, float64."""
    return uniform(bits, torch.float64).neg_().log1p_().neg_()


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel of 32 random bits, float64."""
    return exponential(bits).log_().neg_()


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """(bits + 1/2) / 2^32: exact in float64, rounded in float32. Small values are strong candidates."""
    return bits.to(dtype).add_(0.5).mul_(1.0 / _CELLS)


def _words(block: Tensor, seed: Tensor, position: Tensor, purpose: Purpose) -> tuple[Tensor, ...]:
    position_low, position_high = split64(position)
    counter = (block, position_low, position_high, torch.full_like(position_high, int(purpose)))
    return philox4x32(counter, split64(seed))
