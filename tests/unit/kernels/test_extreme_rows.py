"""Rows of logits that give no token, and extremes of every parameter: no row touches another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_integration.logit_rules import Entries, LogitRules, Penalties
from kernels_integration.philox import Purpose
from kernels_integration.rejection import draw, probabilities, rejection_of
from kernels_integration.sampling import SamplingRows, sample
from kernels_integration.token_marks import NO_TOKEN
from tests.unit.kernels.test_sampling import make_rows, on_ranks, pick, sample_on

INF = math.inf
VOCAB = 12
OPTIONS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 2},
    {"min_p": 0.3},
    {"top_k": 1},
    {"top_p": 1e-46, "temperature": 1e-5},
]


def with_rules(rows: SamplingRows, rules: LogitRules) -> SamplingRows:
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return SamplingRows(**{f: getattr(rows, f) for f in fields}, rules=rules)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, INF, -INF], ids=str)
@pytest.mark.parametrize("num_logprobs", [-1, 2])
def test_a_row_without_a_finite_logit_gives_no_token_on_any_rank(size, options, bad, num_logprobs):
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = make_rows(5, seed=torch.arange(5), num_logprobs=num_logprobs, **options)
    expected = sample_on(logits, rows, size).tokens
    dirty = logits.clone()
    dirty[1] = bad
    dirty[3] = bad
    found = sample_on(dirty, rows, size).tokens.tolist()
    assert (found[1], found[3]) == (NO_TOKEN, NO_TOKEN)
    healthy = [0, 2, 4]
    assert [found[i] for i in healthy] == expected[healthy].tolist()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rules_that_failed_on_one_rank_give_no_token_on_all(size, options):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = make_rows(4, seed=torch.arange(4), **options)
    expected = sample_on(logits, rows, size).tokens.tolist()

    def call(x, start, comm):
        failed = with_rules(rows, LogitRules(failed_rows=torch.tensor([2])))
        whole = with_rules(rows, LogitRules())
        mine = failed if comm.rank == size - 1 else whole
        return sample(x, start, mine, comm).tokens.tolist(), probabilities(x, start, mine, comm)

    for tokens, probability in on_ranks(logits, size, call):
        assert tokens == [*expected[:2], NO_TOKEN, expected[3]]
        assert probability.isnan().all(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("size", [1, 2])
def test_bans_of_everything_give_no_token(size):
    def call(x, start, comm):
        count = x.shape[1]
        banned = Entries(row=torch.zeros(count, dtype=torch.int64), column=torch.arange(count))
        rows = with_rules(make_rows(2, seed=torch.arange(2)), LogitRules(banned=banned))
        return sample(x, start, rows, comm).tokens.tolist()

    for tokens in on_ranks(torch.zeros(2, VOCAB), size, call):
        assert tokens[0] == NO_TOKEN
        assert 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_a_finite_logit_stays_one_under_every_penalty_and_temperature(dtype, temperature):
    """The best of two, wherever dividing by a small number leaves the dtype's range."""
    end = torch.finfo(dtype).max
    logits = torch.tensor([[-INF, end, -end], [-INF, -end, -INF]], dtype=dtype)
    penalties = Penalties(
        row=torch.arange(2),
        repetition=torch.tensor([0.01, 100.0], dtype=torch.float64),
        frequency=torch.zeros(2, dtype=torch.float64),
        presence=torch.zeros(2, dtype=torch.float64),
        counts=torch.ones(2, 3, dtype=torch.int32),
        in_prompt=torch.zeros(2, 3, dtype=torch.bool),
    )
    rows = with_rules(make_rows(2, temperature=temperature), LogitRules(penalties=penalties))
    found = sample_on(logits, rows).tokens.tolist()
    assert found[0] == 1
    # Dividing a very negative logit may carry it to -inf: alone in its row, it then gives no token.
    assert found[1] == (1 if temperature in (0.0, 1.0) else NO_TOKEN)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 5e-324, 1e-46, 9.9e-6, 1e-5, 1e-3, 1.0, 100.0]),
            st.sampled_from([0, 1, 2, VOCAB, VOCAB + 1, 2**31, 2**63 - 1]),
            st.one_of(st.sampled_from([5e-324, 1e-46, 1e-8, 1.0]), st.floats(0, 1, exclude_min=True)),
            st.one_of(st.sampled_from([0.0, 5e-324, 1e-46, 1.0]), st.floats(0, 1)),
            st.integers(0, 2**64 - 1),
            st.sampled_from(["plain", "nan", "inf", "-inf", "huge", "tiny"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_row_of_extremes_is_what_it_is_alone(cases, dtype, size, precision):
    """Legal parameters, kept in either precision; a row with something finite always gives a token."""
    logits = torch.randn(len(cases), VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(3))
    for row, case in enumerate(cases):
        match case[5]:
            case "nan" | "inf" | "-inf":
                logits[row] = float(case[5])
            case "huge":
                logits[row] = torch.finfo(dtype).max
                logits[row, 3] = -torch.finfo(dtype).max
            case "tiny":
                logits[row] *= torch.finfo(dtype).tiny
    temperature, top_k, top_p, min_p, seeds, kinds = zip(*cases, strict=True)
    rows = SamplingRows(
        temperature=torch.tensor(temperature, dtype=precision),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=precision),
        min_p=torch.tensor(min_p, dtype=precision),
        seed=torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds]),
        position=torch.arange(len(cases)),
    )
    together = sample_on(logits, rows, size).tokens.tolist()
    for row, kind in enumerate(kinds):
        alone = sample_on(logits[row : row + 1], pick(rows, slice(row, row + 1))).tokens.tolist()
        assert [together[row]] == alone
        is_dead = kind in ("nan", "inf", "-inf")
        assert (together[row] == NO_TOKEN) == is_dead
        if not is_dead and top_p[row] < 1e-8 and kind == "plain":
            assert together[row] == int(logits[row].argmax())


@pytest.mark.parametrize("size", [1, 2])
def test_standard_rejection_of_rows_that_draw_nothing(size):
    """A dead target accepts nothing and puts nothing in its place; a dead draft is refused."""
    logits = torch.randn(3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    dead_target, dead_draft = logits.clone(), logits.clone()
    dead_target[0] = math.nan
    dead_draft[1] = -INF
    seed, position = torch.arange(3), torch.arange(3) + 9

    def call(x, start, comm):
        half = x.shape[1] // 2
        rows = make_rows(3, seed=seed, position=position)
        target = probabilities(x[:, :half].contiguous(), start // 2, rows, comm)
        draft = probabilities(x[:, half:].contiguous(), start // 2, rows, comm)
        tokens = draw(draft, start // 2, seed, position, Purpose.DRAFT, comm)
        assert tokens[1] == NO_TOKEN
        rejection = rejection_of(
            target, draft.nan_to_num(nan=0.0), tokens.clamp(min=0), start // 2, seed, position, comm
        )
        bonus = draw(target, start // 2, seed, position, Purpose.BONUS, comm)
        return rejection.ratio.tolist(), rejection.residual.tolist(), bonus.tolist()

    step = VOCAB // size
    interleaved = torch.cat(
        [
            torch.cat((dead_target[:, i : i + step], dead_draft[:, i : i + step]), 1)
            for i in range(0, VOCAB, step)
        ],
        1,
    )
    for ratio, residual, bonus in on_ranks(interleaved, size, call):
        assert ratio[:2] == [0.0, 0.0]
        assert (residual[0], bonus[0]) == (NO_TOKEN, NO_TOKEN)
        assert 0 <= residual[1] < VOCAB
        assert min(bonus[1:]) >= 0
