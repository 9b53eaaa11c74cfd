"""The one sum that every CPU transport uses, so that their results are equal bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """((parts[0] + parts[1]) + parts[2]) + ..., into `out` if given; `out` may be one of the first two parts.

    Half precision is added in float32 and rounded once at the end; integers wrap as torch's do.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.clone() if out is None else out.copy_(first)
    if len(parts) > 2 and first.dtype in (torch.bfloat16, torch.float16):
        total = first.float()
        for part in parts[1:]:
            total += part
        return total.to(first.dtype) if out is None else out.copy_(total)
    total = torch.add(first, parts[1]) if out is None else torch.add(first, parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total
