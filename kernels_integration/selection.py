"""Which local KV each row attends to."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Row t attends to the slots kv_indices[kv_indptr[t]:kv_indptr[t + 1]] of this rank's cache.

    Per row ascending by position, no holes.
    """

    kv_indptr: Tensor
    """[T + 1] int32, cumulative."""
    kv_indices: Tensor
    """[n] int32 or int64 local slots."""
