"""Norms, rotary embedding and embedding rows in torch. T packed rows, R rotary dims."""

import torch
import torch.nn.functional as F
from torch import Tensor


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


def rotary_table(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """[T, R/2] complex: factor * e^(i * position * frequency), angles rounded as transformers rounds them."""
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    table = torch.complex(angles.cos(), angles.sin())
    return table if factor == 1.0 else table.mul_(factor)


def rotate_pairs(x: Tensor, table: Tensor, out: Tensor | None = None) -> None:
    """RoPE over neighbouring pairs (2j, 2j+1) of x [T, ..., R], written to `out` or in place.

    `table` is [T, R/2] (broadcast over the dims between). Weights of families that rotate halves are
    reordered at load time, so that one rotation serves all.
    """
    out = x if out is None else out
    table = table.view(table.shape[0], *[1] * (x.dim() - 2), table.shape[1])
    if x.dtype is torch.bfloat16:
        turned = _as_complex(x.float()).mul_(table)
        out.copy_(torch.view_as_real(turned).flatten(-2))
    else:
        torch.mul(_as_complex(x), table, out=_as_complex(out))


def embed(token_ids: Tensor, table: Tensor, first_id: int | None) -> Tensor:
    """[T, hidden]: rows of table [ids, hidden], which begins at first_id; zeros for ids outside it.

    first_id None: the table holds all ids, and all are legal.
    """
    if first_id is None:
        return F.embedding(token_ids, table)
    local = token_ids - first_id
    here = (local >= 0) & (local < table.shape[0])
    return F.embedding(local.where(here, 0), table).mul_(here.unsqueeze(-1))


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
