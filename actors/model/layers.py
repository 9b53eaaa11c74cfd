"""Norms and rotary embedding. T packed rows, R rotary dims."""

import torch
import torch.nn.functional as F
from torch import Tensor

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


def rotary_frequencies(theta: float, dim: int, dtype: torch.dtype) -> Tensor:
    """[R/2]: theta^(-2j/R), in the dtype that angles are computed in."""
    dtype = accumulate_dtype(dtype)
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=dtype) / dim))


def rotary_table(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[T, R/2] complex: e^(i * position * frequency), angles rounded as transformers rounds them."""
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    return torch.complex(angles.cos(), angles.sin())


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
