"""Philox4x32-10, the counter-based generator behind every random choice, and what its words mean here.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); checked against the
known-answer vectors of its reference implementation, Random123.

The arithmetic works on Python ints and on int64 tensors alike (words are held in 0..2^32 - 1), so
host and device agree and the host needs no torch.

Layout. Key: the request's 64-bit seed, low word first. Counter: (token // 4, position low word,
position high word, purpose). Word token % 4 of the result belongs to the token. `position` is the
index, in prompt + completion, of the token being drawn. A block of four tokens is one Philox call, and
nothing else enters it: not the shard, not the batch, not the step.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

MASK32 = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85

Word = TypeVar("Word", int, "Tensor")
Words4: TypeAlias = tuple[Word, Word, Word, Word]


class Purpose(IntEnum):
    """What a random word decides: the last counter word. Two purposes never share a word."""

    COUPLED = 0
    """Gumbel noise of target and, on purpose the same, of draft."""
    DRAFT = 1
    """Standard rejection sampling: noise of the draft's own draw."""
    ACCEPT = 2
    """Standard rejection sampling: the accept test's uniform (word of token 0)."""
    RESIDUAL = 3
    """Standard rejection sampling: noise of the draw from max(p - q, 0)."""
    BONUS = 4
    """Standard rejection sampling: noise of the bonus token."""
    CHOICE_SEED = 5
    """The seed of choice i of n."""


def philox4x32(counter: "Words4[Word]", key: tuple[Word, Word], rounds: int = 10) -> "Words4[Word]":
    """The four 32-bit words of `counter` under `key`, each in 0..2^32 - 1.

    Tensor words are int64 and broadcast against each other: a counter word that is the same for all
    tokens of a row costs nothing until it is mixed with one that is not.
    """
    x0, x1, x2, x3 = counter
    for round_number in range(rounds):
        k0, k1 = round_key(key, round_number)
        # A product of two 32-bit words may exceed int63: the tensor wraps, its bits are right. So the
        # shift brings in sign bits, which the mask removes. x1, x3 and the keys need no mask of their
        # own, since only their low halves reach a product.
        product_0 = x0 * MULTIPLIER_0
        product_1 = x2 * MULTIPLIER_1
        x0 = ((product_1 >> 32) ^ x1 ^ k0) & MASK32
        x2 = ((product_0 >> 32) ^ x3 ^ k1) & MASK32
        x1, x3 = product_1, product_0
    return x0, x1 & MASK32, x2, x3 & MASK32


def round_key(key: tuple[Word, Word], round_number: "Word | int") -> tuple[Word, Word]:
    """The key of a round, or of several; only the low 32 bits of each word count."""
    return key[0] + round_number * _WEYL_0, key[1] + round_number * _WEYL_1


def split64(value: Word) -> tuple[Word, Word]:
    """(low, high) 32-bit words of a 64-bit pattern; negative values are two's complement."""
    return value & MASK32, (value >> 32) & MASK32


def choice_seed(seed: int, choice: int) -> int:
    """uint64 seed of choice `choice` of a request's n completions; choice 0 keeps the request's own.

    seed may be given as int64 or uint64: the bit pattern counts.
    """
    if choice == 0:
        return seed & (MASK32 << 32 | MASK32)
    low, high = split64(choice)
    words = philox4x32((low, high, 0, int(Purpose.CHOICE_SEED)), split64(seed))
    return words[0] | words[1] << 32
