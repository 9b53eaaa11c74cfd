"""Standard rejection sampling against full softmaxes, plain rejection, and the distributions it must give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from actors.acceptance import StandardRejection, accept_uniform, count_emitted, standard_tokens
from kernels_integration.philox import Purpose, philox4x32, split64
from kernels_integration.rejection import draw, probabilities, rejection_of
from tests.support.reference import filtered_probabilities
from tests.unit.kernels.test_sampling import make_rows, on_ranks

FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.05}]


def whole(parts):
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_probabilities_are_those_of_full_sorts(size, filters):
    logits = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    rows = make_rows(5, temperature=[0.5, 1.0, 2.0, 0.0, 1.3], **filters)
    parts = on_ranks(logits, size, lambda x, start, comm: probabilities(x, start, rows, comm))
    found = whole(parts)
    for row, temperature in enumerate([0.5, 1.0, 2.0, 0.0, 1.3]):
        expected = (
            torch.nn.functional.one_hot(logits[row].argmax(), 16).double()
            if temperature == 0
            else filtered_probabilities(logits[row : row + 1], temperature=temperature, **filters)[0]
        )
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_no_rows_have_no_probabilities(size):
    parts = on_ranks(
        torch.empty(0, 16), size, lambda x, start, comm: probabilities(x, start, make_rows(0), comm)
    )
    assert [part.shape for part in parts] == [(0, 16 // size)] * size
    assert parts[0].dtype == torch.float64


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40))
def test_the_uniform_of_arrays_is_the_word_of_philox(seed, position):
    word = philox4x32((0, *split64(position), int(Purpose.ACCEPT)), split64(seed))[0]
    [found] = accept_uniform(np.array([seed], np.uint64).astype(np.int64), np.array([position]))
    assert float(found) == (word >> 8) / 2**24
    assert found.dtype == np.float32


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokens_are_what_plain_rejection_emits(data):
    """The walk as the paper writes it, one verify at a time, against standard_tokens and count_emitted."""
    k = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    num_drafts = sum(k)
    drafts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=num_drafts, max_size=num_drafts)), int)
    ratios = data.draw(st.lists(st.floats(0, 1.5, width=32), min_size=num_drafts, max_size=num_drafts))
    residual = (
        drafts
        + 1
        + np.array(data.draw(st.lists(st.integers(0, 4), min_size=num_drafts, max_size=num_drafts)), int)
    ) % 6
    seeds, positions = np.arange(len(k)) * 7 + 1, np.arange(len(k)) * 11 + 3
    bonus = np.arange(len(k)) + 100
    rejection = StandardRejection(ratio=np.array(ratios, np.float32), residual=residual, bonus=bonus)
    tokens = standard_tokens(drafts, rejection, np.array(k), seeds=seeds, positions=positions)
    emitted = count_emitted(drafts, tokens, np.array(k))
    first_draft = first_token = 0
    for i, n in enumerate(k):
        expected = []
        for j in range(n):
            [u] = accept_uniform(seeds[i : i + 1], positions[i : i + 1] + j)
            if not u < np.float32(ratios[first_draft + j]):
                expected.append(residual[first_draft + j])
                break
            expected.append(drafts[first_draft + j])
        else:
            expected.append(bonus[i])
        assert tokens[first_token : first_token + emitted[i]].tolist() == expected
        first_draft, first_token = first_draft + n, first_token + n + 1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", ["near", "far", "disjoint", "equal", "greedy"])
def test_what_is_emitted_has_the_target_distribution(case, size):
    num, vocab = 20_000, 6
    p = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1, 0.0], dtype=torch.float64)
    q = {
        "near": torch.tensor([0.25, 0.3, 0.2, 0.1, 0.1, 0.05]),
        "far": torch.tensor([0.0, 0.05, 0.05, 0.1, 0.2, 0.6]),
        "disjoint": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        "equal": p,
        "greedy": torch.tensor([1.0, 0, 0, 0, 0, 0]),
    }[case].double()
    seeds, positions = torch.arange(num) * 3 + 5, torch.full((num,), 17)

    def run(x, start, comm):
        target, draft = x[:1].expand(num, -1), x[1:].expand(num, -1)
        tokens = draw(draft, start, seeds, positions, Purpose.DRAFT, comm)
        return tokens, rejection_of(target, draft, tokens, start, seeds, positions, comm)

    results = on_ranks(torch.stack((p, q)), size, run)
    tokens, rejection = results[0]
    for other_tokens, other in results[1:]:
        assert torch.equal(tokens, other_tokens)
        assert torch.equal(rejection.ratio, other.ratio)
        assert torch.equal(rejection.residual, other.residual)
    accepted = accept_uniform(seeds.numpy(), positions.numpy()) < rejection.ratio.numpy()
    emitted = np.where(accepted, tokens.numpy(), rejection.residual.numpy())
    counts = np.bincount(emitted, minlength=vocab)
    assert counts[p.numpy() == 0].sum() == 0
    assert stats.chisquare(counts[:5], num * p.numpy()[:5]).pvalue > 1e-3
    optimum = float(torch.minimum(p, q).sum())
    assert abs(accepted.mean() - optimum) < 0.015
    assert not (rejection.residual.numpy() == tokens.numpy())[~accepted].any()
