"""Draws of fixed shapes are those of `sample`, whatever the parameters, the logits and the ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.shard.device_sampler import draw_rows
from kernels_integration.logit_rules import LogitRules
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.sampling import SamplingRows, sample
from tests.unit.kernels.test_sampling import on_ranks

VOCAB = 13
ROW = st.tuples(
    st.sampled_from([0.0, 1e-46, 1e-5, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 5, VOCAB, 2**63 - 1]),
    st.one_of(st.sampled_from([5e-324, 1e-46, 0.2, 0.5, 1.0]), st.floats(0, 1, exclude_min=True)),
    st.one_of(st.sampled_from([0.0, 5e-324, 0.3, 1.0]), st.floats(0, 1)),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(
        st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 1.0, 4.0, -math.inf, math.inf, math.nan, 3e38, -3e38]),
        min_size=VOCAB,
        max_size=VOCAB,
    ),
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=5),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_they_are_those_of_sample(cases, size, dtype, has_failed) -> None:
    temperature, top_k, top_p, min_p, seed, logits = zip(*cases, strict=True)
    failed = LogitRules(failed_rows=torch.tensor([0])) if has_failed else None
    rows = SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float64),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        min_p=torch.tensor(min_p, dtype=torch.float64),
        seed=torch.tensor(seed),
        position=torch.arange(len(cases)) + 5,
        rules=failed,
    )
    has_filters = bool(rows.cuts().active(VOCAB).any())

    def both(x, start, comm):
        expected = sample(x, start, rows, comm).tokens
        return expected.tolist(), draw_rows(
            x, start, rows, comm, TorchBackend(), has_filters=has_filters
        ).tolist()

    for expected, found in on_ranks(torch.tensor(logits, dtype=dtype), size, both):
        assert found == expected


@pytest.mark.parametrize("count", [1, 6144])
def test_a_whole_vocabulary(count) -> None:
    """Noise and cuts of the bundled checkpoint's size, with and without the sort."""
    logits = torch.randn(24, count, generator=torch.Generator().manual_seed(1)) * 3
    columns = {
        "temperature": torch.linspace(0, 2, 24).double(),
        "seed": torch.arange(24) * 77,
        "position": torch.arange(24),
    }
    none = torch.zeros(24)
    plain = {"top_k": none.long(), "top_p": torch.ones(24).double(), "min_p": none}
    cut = {"top_k": torch.arange(24) * 40, "top_p": torch.linspace(0.05, 1, 24).double(), "min_p": none}
    for filters, has_filters in ((plain, False), (plain, True), (cut, True)):
        rows = SamplingRows(**columns, **filters)

        def both(x, start, comm, rows=rows, has_filters=has_filters):
            return (
                sample(x, start, rows, comm).tokens,
                draw_rows(x, start, rows, comm, TorchBackend(), has_filters=has_filters),
            )

        [(expected, found)] = on_ranks(logits, 1, both)
        assert torch.equal(found, expected)
