"""Decode context parallelism: which rank holds which KV token, and how the ranks' attention is merged.

W = ranks of the DCP group, r = rank, S = interleave in tokens, g = global position, j = local index.
The arithmetic takes Python ints, NumPy arrays and integer tensors alike (arrays broadcast).
"""

from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True, slots=True)
class DcpGroup:
    """This rank's place in its DCP group. A group of one rank holds every token."""

    interleave: int
    comm: Collectives

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
    no two ranks can disagree about it.

    One exchange carries o and lse of all heads to every rank: between CPU ranks a second exchange
    costs more than the bytes it would save.
    """
    W, r = dcp.size, dcp.rank
    if W == 1:
        return o
    _, heads_all, C = o.shape
    if heads_all % W:
        raise ConfigError(
            f"{heads_all} query heads in a DCP group of {W} ranks: the group's heads must divide evenly; "
            f"use a decode-context-parallel size that divides {heads_all}"
        )
    heads = heads_all // W
    lse_as_o = lse.unsqueeze(-1).contiguous().view(o.dtype)
    packed = dcp.comm.all_gather(torch.cat((o, lse_as_o), -1))[:, :, r * heads : (r + 1) * heads]
    lses = packed[..., C:].contiguous().view(lse.dtype)
    return merge_partials(packed[..., :C], lses.squeeze(-1)).to(o.dtype)


def merge_partials(o: Tensor, lse: Tensor) -> Tensor:
    """Merges normalised partial outputs o [parts, ..., C] by their lse [parts, ...]; in lse's dtype.

    The rules for parts without KV are those of `merge_attention`.
    """
    none = float("-inf")
    lse = lse.nan_to_num(nan=none, posinf=none, neginf=none).unsqueeze(-1)
    weights = lse.softmax(0).nan_to_num(nan=0.0)
    return (weights * o.to(lse.dtype).masked_fill(lse == none, 0.0)).sum(0)
