"""Decode context parallelism: which rank holds which KV token, and how the ranks' attention is merged.

W = ranks of the DCP group, r = rank, S = interleave in tokens, g = global position, j = local index.
The arithmetic takes Python ints, NumPy arrays and integer tensors alike (arrays broadcast).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels_integration.collectives import Collectives
from kernels_integration.errors import ConfigError

IntLike = TypeVar("IntLike", int, Tensor)
Positions = TypeVar("Positions", int, Tensor, NDArray[np.int64])


def owner(g: Positions, W: int, S: int) -> Positions:
    """The rank that holds global position g."""
    return (g // S) % W


def local_index(g: Positions, W: int, S: int) -> Positions:
    """The index of global position g among its owner's tokens."""
    return (g // (S * W)) * S + g % S


def global_position(j: IntLike, r: int, W: int, S: int) -> IntLike:
    """The global position of rank r's local token j: the inverse of `owner` and `local_index`."""
    return ((j // S) * W + r) * S + j % S


def local_length(n: IntLike, r: int, W: int, S: int) -> IntLike:
    """How many of the global positions 0..n-1 rank r holds.

    A row at global position p sees local_length(p + 1, r, W, S) tokens of rank r, in a verify too:
    counting back from the local length of the whole request drops the newest tokens on most ranks.
    """
    base = (n // S // W) * S
    over = n - base * W - r * S
    if isinstance(over, Tensor):
        return base + over.clamp(0, S)
    return base + min(max(over, 0), S)


Exchange: TypeAlias = Literal["a2a", "ag_rs"]
"""How attention is merged: a packed all-to-all, or an all-gather of LSEs and a reduce-scatter of outputs."""


@dataclass(frozen=True, slots=True)
class DcpGroup:
    """This rank's place in its DCP group. A group of one rank holds every token."""

    interleave: int
    comm: Collectives
    exchange: Exchange = "a2a"

    def __post_init__(self) -> None:
        if self.interleave < 1:
            raise ConfigError(
                f"DCP interleave {self.interleave} is not a number of tokens; "
                "use 1 or another divisor of block_size"
            )

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    def owner(self, g: Positions) -> Positions:
        return owner(g, self.comm.size, self.interleave)

    def local_index(self, g: Positions) -> Positions:
        return local_index(g, self.comm.size, self.interleave)

    def global_position(self, j: IntLike) -> IntLike:
        """The global position of this rank's local token j."""
        return global_position(j, self.comm.rank, self.comm.size, self.interleave)

    def local_length(self, n: IntLike) -> IntLike:
        """How many of the global positions 0..n-1 this rank holds."""
        return local_length(n, self.comm.rank, self.comm.size, self.interleave)


def merge_attention(o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
    """Attention over the KV of all ranks, for this rank's own heads.

    o [rows, heads_all, C] and lse [rows, heads_all] (natural log, fp32; fp64 when o is fp64) are the
    attention of all heads over this rank's KV, heads_all ordered by DCP rank. Returns
    [rows, heads_all / W, C] in o's dtype, merged in lse's; a group of one rank gets o itself.

    A rank without KV for a row (lse = -inf) contributes 0, whatever its o holds; an lse of NaN or
    +inf counts as -inf; where no rank has KV the result is 0. Each head is merged on one rank alone, so
    no two ranks can disagree about it. The two exchanges differ in the last bits, not in this.
    """
    if dcp.size == 1:
        return o
    heads_all = o.shape[1]
    if heads_all % dcp.size:
        raise ConfigError(
            f"{heads_all} query heads in a DCP group of {dcp.size} ranks: the group's heads must divide "
            f"evenly; use a decode-context-parallel size that divides {heads_all}"
        )
    return (_merge_by_a2a if dcp.exchange == "a2a" else _merge_by_ag_rs)(o, lse, dcp)


def _merge_by_a2a(o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
    """One exchange: each head's o and lse go to the rank that owns the head."""
    C = o.shape[2]
    packed = torch.cat((o, lse.unsqueeze(-1).contiguous().view(o.dtype)), -1)
    received = dcp.comm.all_to_all(_by_owner(packed, dcp))
    lses = received[..., C:].contiguous().view(lse.dtype)
    return merge_partials(received[..., :C], lses.squeeze(-1)).to(o.dtype)


def _merge_by_ag_rs(o: Tensor, lse: Tensor, dcp: DcpGroup) -> Tensor:
    """Two exchanges: all ranks' lse tell each its weight, and the weighted o are added where they belong."""
    weight = _weights(dcp.comm.all_gather(lse))[dcp.rank].unsqueeze(-1)
    # A rank without KV adds 0 whatever its o holds.
    weighted = (weight * o.to(lse.dtype)).masked_fill(weight == 0, 0.0)
    return dcp.comm.reduce_scatter(_by_owner(weighted, dcp)).to(o.dtype)


def _by_owner(x: Tensor, dcp: DcpGroup) -> Tensor:
    """[W, rows, heads, ...] of x [rows, heads_all, ...]"""
    return x.view(x.shape[0], dcp.size, -1, *x.shape[2:]).transpose(0, 1)


def merge_partials(o: Tensor, lse: Tensor) -> Tensor:
    """Merges normalised partial outputs o [parts, ..., C] by their lse [parts, ...]; in lse's dtype.

    The rules for parts without KV are those of `merge_attention`.
    """
    weights = _weights(lse).unsqueeze(-1)
    return (weights * o.to(lse.dtype)).masked_fill(weights == 0, 0.0).sum(0)


def _weights(lse: Tensor) -> Tensor:
    """What each part counts of lse [parts, ...]: exp(lse - LSE), 0 for parts without KV."""
    none = float("-inf")
    return lse.nan_to_num(nan=none, posinf=none, neginf=none).softmax(0).nan_to_num(nan=0.0)
