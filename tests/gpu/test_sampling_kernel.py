"""Draws in Triton against torch's sampler, token for token, and acceptance against the coordinator's rule."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from actors.acceptance import count_emitted
from kernels_integration.collectives import SoloCollectives
from kernels_integration.reference.drawing import survives
from kernels_integration.sampling import SamplingRows, over_temperature, sample
from kernels_integration.token_marks import NO_TOKEN
from kernels_integration.triton import sampling
from kernels_integration.triton.filters import cut_rows
from tests.support.guarded import Guarded


def rows_of(temperature: Tensor, seed: int) -> SamplingRows:
    generator = torch.Generator().manual_seed(seed)
    count = len(temperature)
    whole = torch.iinfo(torch.int64)
    return SamplingRows(
        temperature=temperature,
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seed=torch.randint(whole.min, whole.max, (count,), generator=generator),
        position=torch.randint(0, 1 << 34, (count,), generator=generator),
    )


def drawn(device: torch.device, logits: Tensor, rows: SamplingRows, vocab_start: int = 0) -> Tensor:
    tokens = Guarded((len(logits),), torch.int64, device)
    sampling.draw(
        Guarded.of(logits, device).tensor,
        rows.temperature.to(device),
        rows.seed.to(device),
        rows.position.to(device),
        tokens.tensor,
        vocab_start=vocab_start,
    )
    tokens.check()
    return tokens.tensor.cpu()


@pytest.mark.parametrize(("vocab", "vocab_start"), [(50, 0), (4096, 0), (4097, 3), (9001, 6)])
def test_draws_what_torch_draws(device, vocab, vocab_start):
    generator = torch.Generator().manual_seed(vocab)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1e-6, 2.0, 0.05, 1.0, 2e-5])
    logits = torch.randn(8, vocab, generator=generator) * 3
    logits[7] *= 1e34  # beyond float32 over its temperature: noise alone decides
    logits[6] = logits[6].round()
    rows = rows_of(temperature, seed=vocab)
    expected = sample(logits, vocab_start, rows, SoloCollectives()).tokens
    assert torch.equal(drawn(device, logits, rows, vocab_start), expected)


@pytest.mark.gpu
def test_draws_what_torch_draws_from_a_large_vocabulary(device):
    generator = torch.Generator().manual_seed(5)
    for seed in range(5):
        logits = torch.randn(64, 102400, generator=generator) * 2
        rows = rows_of(torch.rand(64, generator=generator), seed)
        expected = sample(logits, 0, rows, SoloCollectives()).tokens
        assert torch.equal(drawn(device, logits, rows), expected)


def test_ties_go_to_the_lower_token(device):
    logits = torch.zeros(1, 5000)
    logits[0, [700, 701, 4999]] = 1.0
    assert drawn(device, logits, rows_of(torch.zeros(1), 0)).tolist() == [700]


def test_what_is_no_number_is_never_drawn(device):
    logits = torch.full((5, 100), -torch.inf)
    logits[0, 3], logits[0, 4], logits[0, 5] = torch.nan, torch.inf, -1e30
    logits[1] = torch.nan
    logits[2] = torch.inf
    logits[4, 99] = 0.0
    for temperature in (0.0, 1.0):
        tokens = drawn(device, logits, rows_of(torch.full((5,), temperature), 0))
        assert tokens.tolist() == [5, NO_TOKEN, NO_TOKEN, NO_TOKEN, 99]


@pytest.mark.parametrize("most_drafts", [0, 1, 3, 8])
def test_counts_what_the_coordinator_counts(device, most_drafts):
    generator = torch.Generator().manual_seed(most_drafts)
    requests = 300
    drafts = torch.randint(0, 3, (requests, most_drafts), generator=generator)
    tokens = torch.randint(-2, 3, (requests, most_drafts + 1), generator=generator)
    k = torch.randint(0, most_drafts + 1, (requests,), generator=generator)
    emitted = Guarded((requests,), torch.int32, device)
    sampling.count_emitted(tokens.to(device), drafts.to(device), k.to(device), emitted.tensor)
    emitted.check()
    in_row = torch.arange(most_drafts + 1) <= k.unsqueeze(1)
    expected = count_emitted(
        drafts[in_row[:, 1:]].numpy(), tokens[in_row].numpy(), np.asarray(k, dtype=np.int64)
    )
    assert emitted.tensor.tolist() == expected.tolist()


def cut_case(vocab: int, seed: int, *, is_rounded: bool = False) -> tuple[Tensor, SamplingRows]:
    """Each filter alone and all together; ties, where rounded."""
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.6, 1.3, 0.0, 2.0, 1.0, 1e-5, 1.0, 1.0, 1.0])
    logits = torch.randn(12, vocab, generator=generator) * 2
    if is_rounded:
        logits = logits.round()
    logits[9, :] = 0.5
    logits[10, 7:] = -torch.inf
    logits[11, [3, 5]] = torch.tensor([torch.nan, torch.inf])
    rows = SamplingRows(
        temperature=temperature,
        top_k=torch.tensor([5, 0, 0, 50, vocab + 3, 7, 0, 0, 20, 6, 0, 1]),
        top_p=torch.tensor(
            [1.0, 0.9, 1.0, 0.95, 0.5, 0.3, 0.0, 1.0, 0.9, 0.5, 0.8, 0.9], dtype=torch.float64
        ),
        min_p=torch.tensor([0, 0, 0.1, 0.05, 0, 0, 0, 1.0, 0, 0, 0, 0], dtype=torch.float64),
        seed=torch.randint(0, 1 << 40, (12,), generator=generator),
        position=torch.randint(0, 1 << 20, (12,), generator=generator),
    )
    return logits, rows


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("vocab", [9, 300, 5000, pytest.param(102400, marks=pytest.mark.gpu)])
def test_filters_keep_what_torch_keeps(device, vocab, is_rounded):
    """The last token kept, and the whole set: by the sort of the torch backend."""
    logits, rows = cut_case(vocab, vocab, is_rounded=is_rounded)
    greedy = (rows.temperature < 1e-5) | (rows.top_k == 1)
    temperature = rows.temperature.masked_fill(greedy, 0.0)
    ranks, tokens = cut_rows(
        Guarded.of(logits, device).tensor,
        *(part.to(device) for part in (temperature, rows.top_k, rows.top_p, rows.min_p)),
    )
    finite = logits.where(logits < torch.inf, -torch.inf)
    scaled = over_temperature(finite, temperature.masked_fill(greedy, 1.0))
    bits = scaled.where(scaled != 0, 0.0).view(torch.int32).long() & 0xFFFFFFFF
    rank = torch.where(bits >= 1 << 31, bits ^ 0xFFFFFFFF, bits ^ 0x80000000) + 1
    ranks, tokens = ranks.cpu().unsqueeze(1), tokens.cpu().unsqueeze(1)
    kept = (rank > ranks) | ((rank == ranks) & (torch.arange(vocab) <= tokens))
    expected = survives(scaled, rows) | greedy.unsqueeze(1)
    assert torch.equal(kept & (scaled > -torch.inf), expected & (scaled > -torch.inf))


@pytest.mark.parametrize("vocab", [300, 5000])
def test_filtered_draws_are_torchs(device, vocab):
    logits, rows = cut_case(vocab, 1)
    expected = sample(logits, 0, rows, SoloCollectives()).tokens
    greedy = rows.top_k == 1
    temperature = rows.temperature.masked_fill(greedy, 0.0).to(device)
    on_device = logits.to(device)
    cuts = cut_rows(on_device, temperature, *(p.to(device) for p in (rows.top_k, rows.top_p, rows.min_p)))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=device)
    sampling.draw(on_device, temperature, rows.seed.to(device), rows.position.to(device), tokens, cuts=cuts)
    assert torch.equal(tokens.cpu(), expected)
