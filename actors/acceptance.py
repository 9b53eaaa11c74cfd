"""Which drafts the target accepts: one pure function for the coordinator and the shards (contracts/mtp.md 4).

The shards go on by it before the coordinator has seen the report, so both must come to the same result.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MASKED = -1
"""Token of a row at or beyond the request's last writable position."""


def count_emitted(drafts: NDArray[Any], tokens: NDArray[Any], k: NDArray[Any]) -> NDArray[np.int64]:
    """[V] how many tokens each verify emits: 1..k+1, the first ones of its rows; 0 where all are masked.

    k [V]: drafts of each verify; a final chunk counts as a verify with k = 0. drafts [sum k]: d_1..d_k of
    each. tokens [sum (k + 1)]: x_0..x_k, the target's own token of each row, or MASKED. x_0 is emitted; x_i
    follows while d_i equals x_{i-1}; a masked row emits nothing.
    """
    num_tokens = k.astype(np.int64) + 1
    if not len(num_tokens):
        return num_tokens
    ends = np.cumsum(num_tokens)
    begins = ends - num_tokens
    goes_on = tokens != MASKED
    follows = np.ones(len(tokens), bool)
    follows[begins] = False
    draft_rows = np.flatnonzero(follows)
    goes_on[draft_rows] &= drafts == tokens[draft_rows - 1]
    first_stop = np.minimum.reduceat(np.where(goes_on, len(tokens), np.arange(len(tokens))), begins)
    emitted: NDArray[np.int64] = np.minimum(first_stop, ends) - begins
    return emitted
