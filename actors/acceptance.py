"""Which drafts the target accepts: one pure function for the coordinator and the shards (contracts/mtp.md 4).

The shards go on by it before the coordinator has seen the report, so both must come to the same result.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kernels_integration.philox import Purpose, philox4x32, split64
from kernels_integration.token_marks import MASKED


def length_of_walk(drafts: Any, tokens: Any) -> Any:
    """[B] int64: how many tokens each of B verifies emits. Of arrays and of tensors alike.

    drafts [B, K]: d_1..d_K. tokens [B, K + 1]: x_0..x_K, the target's own token of each row, or MASKED, also
    in rows that a verify of fewer drafts does not have. x_0 is emitted; x_i follows while d_i equals
    x_{i-1}; a masked row emits nothing. NO_TOKEN is emitted like a token, and as no draft equals it, nothing
    follows it.
    """
    goes_on = tokens != MASKED
    goes_on[:, 1:] &= drafts == tokens[:, :-1]
    return goes_on.cumprod(axis=1).sum(axis=1)


def count_emitted(drafts: NDArray[Any], tokens: NDArray[Any], k: NDArray[Any]) -> NDArray[np.int64]:
    """[V] `length_of_walk` of verifies with k [V] drafts; a final chunk counts as a verify with k = 0.

    drafts [sum k] and tokens [sum (k + 1)]: packed by verify.
    """
    if not len(k):
        return np.zeros(0, np.int64)
    columns, num_drafts = np.arange(int(k.max()) + 1), k.astype(np.int64)[:, None]
    padded_drafts = np.zeros((len(k), len(columns) - 1), np.int64)
    padded_tokens = np.full((len(k), len(columns)), MASKED, np.int64)
    padded_drafts[columns[:-1] < num_drafts] = drafts
    padded_tokens[columns <= num_drafts] = tokens
    emitted: NDArray[np.int64] = length_of_walk(padded_drafts, padded_tokens)
    return emitted


class StandardRejection(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Standard rejection sampling: what decides about the drafts of a step."""

    ratio: NDArray[np.float32]
    """[sum k] p(d) / q(d); -1 where masked, and at a request's last position, where no draft is judged."""
    residual: NDArray[np.int32]
    """[sum k] the token in a rejected draft's place; MASKED where masked."""
    bonus: NDArray[np.int32]
    """[V] the token after all drafts of a verify, or of a final chunk; MASKED where masked."""


def standard_tokens(
    drafts: NDArray[Any],
    rejection: StandardRejection,
    k: NDArray[Any],
    *,
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[sum (k + 1)] tokens for `count_emitted`: the draft where u < ratio, else the residual; then the bonus.

    A residual never equals its draft (but for one at the request's last position, which nothing follows), so
    that rule then emits accepted drafts and what takes the place of the first other.
    seeds [V]: bit patterns of uint64. positions [V]: position of each verify's first token.
    """
    num_drafts = k.astype(np.int64)
    ends = np.cumsum(num_drafts + 1)
    depth = np.arange(len(drafts)) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
    accepted = accept_uniform(np.repeat(seeds, num_drafts), np.repeat(positions, num_drafts) + depth)
    tokens = np.empty(len(drafts) + len(num_drafts), np.int64)
    is_draft = np.ones(len(tokens), bool)
    is_draft[ends - 1] = False
    tokens[is_draft] = np.where(accepted < rejection.ratio, drafts, rejection.residual)
    tokens[ends - 1] = rejection.bonus
    return tokens


def accept_uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform multiples of 2^-24 below 1, exact in float32: word 0 of token 0 at each (seed, position)."""
    # The arithmetic of Philox holds for int64 arrays as for tensors: products wrap, their low bits are right.
    at: Any = positions
    of: Any = seeds
    low, high = split64(at)
    zero = np.zeros_like(at)
    words = philox4x32((zero, low, high, zero + int(Purpose.ACCEPT)), split64(of))
    uniform: NDArray[np.float32] = ((words[0] >> 8) * 2.0**-24).astype(np.float32)
    return uniform
