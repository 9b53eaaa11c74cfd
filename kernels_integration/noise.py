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
_BLOCKS_AT_ONCE = 16384  # keeps the scratch words in a core's L2 cache
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
    scratch = torch.empty(7, rows_at_once, blocks_at_once, dtype=torch.int64, device=seed.device)
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

    The first two rounds mix words that are still the same for a whole row, or for a whole column. The
    others run in place, two words at a time: no fresh pages, and half the calls.
    """
    key = split64(seed)
    mixed = philox4x32(_counter(block, position, purpose), key, rounds=2)
    num_rows, num_blocks = bits.shape[:2]
    words = scratch[:, :num_rows, :num_blocks]
    # x0 and x2 with x0 again below: [0:2] reads them in order, [1:3] swapped, as the products need them.
    even, swapped, x0, x0_again = words[0:2], words[1:3], words[0], words[2]
    odd, product = words[3:5], words[5:7]
    for word, value in zip((*even, *odd), (mixed[0], mixed[2], mixed[1], mixed[3]), strict=True):
        word.copy_(value)
    x0_again.copy_(x0)
    # Made on the device: a copy from the host could not be captured in a graph.
    multipliers = torch.arange(2, device=bits.device) * (MULTIPLIER_0 - MULTIPLIER_1) + MULTIPLIER_1
    multipliers = multipliers.view(2, 1, 1)
    rounds = torch.arange(2, 10, device=bits.device).view(-1, 1, 1)
    for round_keys in torch.stack(round_key(key, rounds), dim=1).unbind(0):
        torch.mul(swapped, multipliers, out=product)
        torch.bitwise_right_shift(product, 32, out=even)
        even.bitwise_xor_(odd).bitwise_xor_(round_keys).bitwise_and_(MASK32)
        x0_again.copy_(x0)
        odd, product = product, odd
    bits[:, :, 0], bits[:, :, 2] = even
    bits[:, :, 1], bits[:, :, 3] = odd.bitwise_and_(MASK32)
