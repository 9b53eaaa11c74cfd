"""Norms and rotary embedding. T packed rows, R rotary dims."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.model.rope_config import YarnScaling
from actors.model.weights import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * (x * rsqrt(mean(x^2) + eps)) over the last dim, in the weight's dtype; returns x's dtype."""
    if x.dtype is weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dim, in the weight's dtype; returns x's dtype."""
    if x.dtype is weight.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)


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


def rotary_table(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """[T, R/2] complex: factor * e^(i * position * frequency), angles rounded as transformers rounds them."""
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    table = torch.complex(angles.cos(), angles.sin())
    return table if factor == 1.0 else table.mul_(factor)


def rotate_pairs(x: Tensor, table: Tensor, out: Tensor | None = None) -> None:
    """RoPE over neighbouring pairs (2j, 2j+1) of x [T, ..., R], written to `out` or in place.

    `table` is [T, R/2] (broadcast over the dims between). Weights of families that rotate halves are
    reordered at load time (`halves_to_pairs`), so that one rotation serves all.
    """
    out = x if out is None else out
    table = table.view(table.shape[0], *[1] * (x.dim() - 2), table.shape[1])
    if x.dtype is torch.bfloat16:
        turned = _as_complex(x.float()).mul_(table)
        out.copy_(torch.view_as_real(turned).flatten(-2))
    else:
        torch.mul(_as_complex(x), table, out=_as_complex(out))


def halves_to_pairs(dim: int, rotary_dim: int) -> Tensor:
    """[dim] order that turns half-split rotary dims (j, j + R/2) into neighbours; the rest stays."""
    order = torch.arange(dim)
    order[:rotary_dim] = order[:rotary_dim].view(2, -1).t().flatten()
    return order


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
