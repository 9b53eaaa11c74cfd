"""Draw a token per row in fixed shapes, nothing read back: what `kernels_integration.sampling.sample` draws.

Shape legend: R rows, V tokens of this rank's slice.
"""

import torch
from torch import Tensor

from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives
from kernels_integration.sampling import SamplingRows
from kernels_integration.token_marks import NO_TOKEN


def draw_rows(
    local_logits: Tensor,
    vocab_start: int,
    rows: SamplingRows,
    comm: Collectives,
    backend: Backend,
    *,
    has_filters: bool,
) -> Tensor:
    """[R] int64 tokens; NO_TOKEN in rows without a finite logit. Collective.

    local_logits: [R, V] as for `sample`. has_filters: some row may be cut by top-k, top-p or min-p; False
    skips their sort.
    """
    logits = local_logits
    if rows.rules is not None:
        logits = rows.rules.apply(finite_or_none(logits))
    if comm.size > 1:
        logits, vocab_start = comm.all_gather(logits).transpose(0, 1).flatten(1), 0
    tokens = backend.draw(logits, vocab_start, rows, has_filters=has_filters)
    if rows.rules is None:
        return tokens
    # A row with a NaN: its rules failed on some rank.
    return tokens.masked_fill(logits.isnan().any(dim=1), NO_TOKEN)


def finite_or_none(logits: Tensor) -> Tensor:
    """logits with -inf for NaN and +inf, without asking whether there are any."""
    return logits.where(logits < torch.inf, -torch.inf)
