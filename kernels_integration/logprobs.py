"""Log probabilities of the model's own distribution, over a sharded vocabulary.

Natural logarithm of the softmax of the raw logits: before temperature and filters, vLLM's default
(`raw_logprobs`). Shape legend: R rows, V tokens of this rank's slice, n best tokens, W ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_integration.collectives import Collectives
from kernels_integration.ranking import row_top


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Float64, the same on every rank; `actors.messages.TokenLogprobs` is its wire form."""

    sampled: Tensor
    """[R] of the chosen token."""
    top_ids: Tensor
    """[R, n] int64, best first, ties to the lower id; -1 where the vocabulary has fewer possible tokens."""
    top_values: Tensor
    """[R, n]; -inf where top_ids is -1."""


def logprobs_of(
    logits: Tensor, vocab_start: int, tokens: Tensor, num_top: int, comm: Collectives
) -> Logprobs:
    """Log probabilities of `tokens` [R] and of the num_top best.

    logits: [R, V] of this rank's slice, without NaN or +inf; rank r + 1's slice lies above rank r's. In a row
    without a possible token all are -inf. Collective.
    """
    num_rows, slice_size = logits.shape
    num_local = min(num_top, slice_size)
    peak = logits.amax(dim=1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    mass = (logits - peak).exp_().sum(dim=1, dtype=torch.float64)
    column = tokens - vocab_start
    own = (column >= 0) & (column < slice_size)
    chosen = logits.gather(1, column.clamp(0, slice_size - 1).unsqueeze(1)).squeeze(1).double()
    chosen.masked_fill_(~own, -torch.inf)
    parts = [peak.squeeze(1).double(), mass, chosen]
    if num_local:
        value, top_column = row_top(logits, num_local)
        parts += [*value.double().unbind(1), *(top_column + vocab_start).double().unbind(1)]
    gathered = comm.all_gather(torch.stack(parts))  # [W, 3 + 2 * num_local, R]

    peaks, masses = gathered[:, 0], gathered[:, 1]
    top_peak = peaks.amax(dim=0)
    lse = top_peak + ((peaks - top_peak).exp() * masses).sum(dim=0).log()
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    sampled = gathered[:, 2].amax(dim=0) - lse
    top_values = torch.full((num_rows, num_top), -torch.inf, dtype=torch.float64, device=logits.device)
    top_ids = torch.full((num_rows, num_top), -1, dtype=torch.int64, device=logits.device)
    if num_local:
        # [R, W * num_local], ranks in order: the stable sort leaves ties to the lower id.
        values = gathered[:, 3 : 3 + num_local].permute(2, 0, 1).flatten(1)
        ids = gathered[:, 3 + num_local :].permute(2, 0, 1).flatten(1).long()
        values, order = values.sort(dim=1, descending=True, stable=True)
        num_found = min(num_top, values.shape[1])
        values, ids = values[:, :num_found], ids.gather(1, order[:, :num_found])
        top_values[:, :num_found] = values - lse.unsqueeze(1)
        top_ids[:, :num_found] = ids.masked_fill_(values == -torch.inf, -1)
    return Logprobs(sampled=sampled, top_ids=top_ids, top_values=top_values)
