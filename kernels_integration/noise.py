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

from kernels_integration.philox import (
    MASK32,
    MULTIPLIER_0,
    MULTIPLIER_1,
    Purpose,
    philox4x32,
    round_key,
    split64,
)

_CELLS = 2.0**32
_BLOCKS_AT_ONCE = 16384  # keeps the six scratch words in a core's L2 cache
MAX_GUMBEL = -math.log(-math.log1p(-0.5 / _CELLS))
MIN_GUMBEL = -math.log(-math.log1p(-(_CELLS - 0.5) / _CELLS))


def random_bits(
    seed: Tensor, position: Tensor, vocab_start: int, count: int, purpose: Purpose = Purpose.COUPLED
) -> Tensor:
    """[R, count] int64 in 0..2^32 - 1: the bits of tokens vocab_start..vocab_start + count - 1.

    seed, position: [R] int64 (a seed is the bit pattern of its uint64). vocab_start need not be a multiple
    of 4: the slice is cut out of whole blocks.
    """
    num_rows = seed.shape[0]
    first_block = vocab_start // 4
    num_blocks = -(-(vocab_start + count) // 4) - first_block
    bits = torch.empty(num_rows, num_blocks, 4, dtype=torch.int64, device=seed.device)
    rows_at_once = min(num_rows, max(1, _BLOCKS_AT_ONCE // num_blocks))
    blocks_at_once = min(num_blocks, _BLOCKS_AT_ONCE)
    scratch = torch.empty(6, rows_at_once, blocks_at_once, dtype=torch.int64, device=seed.device)
    for start in range(0, num_blocks, blocks_at_once):
        end = min(start + blocks_at_once, num_blocks)
        block = torch.arange(first_block + start, first_block + end, device=seed.device)
        for row in range(0, num_rows, rows_at_once):
            rows = slice(row, row + rows_at_once)
            _fill(bits[rows, start:end], block, seed[rows, None], position[rows, None], purpose, scratch)
    skipped = vocab_start - 4 * first_block
    return bits.view(num_rows, 4 * num_blocks)[:, skipped : skipped + count]


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
    return philox4x32(_counter(block, position, purpose), split64(seed))


def _counter(block: Tensor, position: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    position_low, position_high = split64(position)
    return block, position_low, position_high, torch.full_like(position_high, int(purpose))


def _fill(
    bits: Tensor, block: Tensor, seed: Tensor, position: Tensor, purpose: Purpose, scratch: Tensor
) -> None:
    """_words into bits [R, blocks, 4], for block [blocks] and seed, position [R, 1].

    The first two rounds mix words that are still the same for a whole row, or for a whole column; the others
    run in place: 28 us instead of 36 to 75 us a row of 6144 tokens, for want of fresh pages.
    """
    key = split64(seed)
    mixed = philox4x32(_counter(block, position, purpose), key, rounds=2)
    num_rows, num_blocks = bits.shape[:2]
    x0, x1, x2, x3, spare_0, spare_1 = scratch[:, :num_rows, :num_blocks].unbind(0)
    for word, value in zip((x0, x1, x2, x3), mixed, strict=True):
        word.copy_(value)
    for round_number in range(2, 10):
        k0, k1 = round_key(key, round_number)
        torch.mul(x0, MULTIPLIER_0, out=spare_0)
        torch.mul(x2, MULTIPLIER_1, out=spare_1)
        torch.bitwise_right_shift(spare_1, 32, out=x0)
        x0.bitwise_xor_(x1).bitwise_xor_(k0).bitwise_and_(MASK32)
        torch.bitwise_right_shift(spare_0, 32, out=x2)
        x2.bitwise_xor_(x3).bitwise_xor_(k1).bitwise_and_(MASK32)
        x1, x3, spare_0, spare_1 = spare_1, spare_0, x3, x1
    for i, word in enumerate((x0, x1.bitwise_and_(MASK32), x2, x3.bitwise_and_(MASK32))):
        bits[:, :, i] = word
