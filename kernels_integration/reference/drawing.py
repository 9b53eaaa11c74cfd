"""Draw a token per row in fixed shapes, nothing read back: what `kernels_integration.sampling.sample` draws.

Shape legend: R rows, V tokens of the slice.
"""

import torch
from torch import Tensor

from kernels_integration.filters import num_kept
from kernels_integration.gumbel_max import Scores
from kernels_integration.noise import gumbel, random_bits
from kernels_integration.sampling import GREEDY_BELOW, SamplingRows, over_temperature
from kernels_integration.token_marks import NO_TOKEN


def draw(logits: Tensor, vocab_start: int, rows: SamplingRows, *, has_filters: bool) -> Tensor:
    """`Backend.draw`."""
    logits = logits.where(logits < torch.inf, -torch.inf)
    greedy = (rows.temperature < GREEDY_BELOW) | (rows.top_k == 1)
    scaled = over_temperature(logits, rows.temperature.masked_fill(greedy, 1.0))
    noise = gumbel(random_bits(rows.seed, rows.position, vocab_start, scaled.shape[1]))
    candidates = scaled.double()
    if has_filters:
        is_cut = ~survives(scaled, rows) & ~greedy.unsqueeze(1)
        candidates = candidates.masked_fill(is_cut, -torch.inf)
    column = torch.arange(scaled.shape[1], device=scaled.device).expand_as(scaled)
    best, column = Scores.of(candidates, noise.masked_fill_(greedy.unsqueeze(1), 0.0)).best(column, dim=1)
    return (column + vocab_start).masked_fill(best.value == -torch.inf, NO_TOKEN)


def survives(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """[R, V] bool: what min-p, top-k and top-p leave of whole rows, by the rule of `filters`."""
    vocab_size = scaled.shape[1]
    value, token = scaled.double().sort(dim=1, descending=True, stable=True)
    peak = value[:, :1].clamp(min=torch.finfo(value.dtype).min)
    kept = num_kept(
        value - peak,
        limit=torch.where(rows.top_k > 0, rows.top_k, vocab_size).clamp_max(vocab_size).unsqueeze(1),
        top_p=rows.top_p.double().unsqueeze(1),
        floor=rows.min_p.double().log().unsqueeze(1),
        vocab_size=vocab_size,
    )
    place = torch.arange(vocab_size, device=scaled.device)
    return torch.zeros_like(scaled, dtype=torch.bool).scatter(1, token, place < kept)
