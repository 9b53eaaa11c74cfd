"""The frequencies of rotary embedding, and the order that its weights are loaded in. R rotary dims."""

import math

import torch
from torch import Tensor

from actors.model.rope_config import YarnScaling
from kernels_integration.weight import accumulate_dtype


def rotary_frequencies(theta: float, dim: int, dtype: torch.dtype, yarn: YarnScaling | None = None) -> Tensor:
    """[R/2]: theta^(-2j/R), in the dtype that angles are computed in.

    With YaRN divided by its factor, all or in part, where a dimension turns less than beta_fast times within
    the original length (YaRN paper, section 3.2).
    """
    dtype = accumulate_dtype(dtype)
    turns = theta ** (torch.arange(0, dim, 2, dtype=dtype) / dim)
    if yarn is None:
        return 1.0 / turns
    low, high = _yarn_ramp(theta, dim, yarn)
    kept = 1 - ((torch.arange(dim // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * turns) * (1 - kept) + 1.0 / turns * kept


def _yarn_ramp(theta: float, dim: int, yarn: YarnScaling) -> tuple[float, float]:
    """Between which rotary pairs interpolation sets in: the last one kept, the first one divided in full."""

    def pair(num_turns: float) -> float:
        """The pair that turns `num_turns` times within the original length."""
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def halves_to_pairs(dim: int, rotary_dim: int) -> Tensor:
    """[dim] order that turns half-split rotary dims (j, j + R/2) into neighbours; the rest stays."""
    order = torch.arange(dim)
    order[:rotary_dim] = order[:rotary_dim].view(2, -1).t().flatten()
    return order
