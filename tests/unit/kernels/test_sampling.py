import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from kernels_integration.collectives import SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.filters import Cuts, surviving
from kernels_integration.gumbel_max import gumbel_max
from kernels_integration.philox import Purpose, philox4x32, split64
from kernels_integration.ranking import row_max, row_top
from kernels_integration.sampling import Sampled, SamplingRows, sample

INF = math.inf


def make_rows(
    num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0, num_logprobs=-1
):
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(num_rows).contiguous()

    return SamplingRows(
        temperature=column(temperature, torch.float64),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64),
        seed=column(seed, torch.int64),
        position=column(position, torch.int64),
        num_logprobs=num_logprobs,
    )


def pick(rows, index):
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return SamplingRows(**{f: getattr(rows, f)[index] for f in fields}, num_logprobs=rows.num_logprobs)


def on_ranks(logits, size, call):
    """call(slice, vocab_start, comm) on `size` ranks; the vocabulary is padded with -inf."""
    padding = -logits.shape[1] % size
    padded = torch.nn.functional.pad(logits, (0, padding), value=-INF)
    count = padded.shape[1] // size
    slices = [padded[:, r * count : (r + 1) * count].contiguous() for r in range(size)]
    if size == 1:
        return [call(slices[0], 0, SoloCollectives())]
    members = InProcessCollectives.create(size, timeout_s=20)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, slices[r], r * count, members[r]) for r in range(size)]
        return [future.result() for future in futures]


def sample_on(logits, rows, size=1) -> Sampled:
    results = on_ranks(logits, size, lambda x, start, comm: sample(x, start, rows, comm))
    for other in results[1:]:
        assert torch.equal(other.tokens, results[0].tokens)
        if results[0].logprobs is not None:
            assert torch.equal(other.logprobs.top_ids, results[0].logprobs.top_ids)
            assert torch.equal(other.logprobs.sampled, results[0].logprobs.sampled)
    return results[0]


# --- an independent reference: one row, plain Python, the full sort ---


def reference_kept(scaled, top_k, top_p, min_p):
    """Token ids that min-p, top-k, top-p leave, best first; None if rounding could decide a cut."""
    order = sorted((i for i in range(len(scaled)) if scaled[i] > -INF), key=lambda i: (-scaled[i], i))
    best = scaled[order[0]]
    if min_p > 0:
        order = [i for i in order if scaled[i] - best >= math.log(min_p)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        # Whole numbers of 2^-100: sums without rounding.
        weights = [int(math.ldexp(math.exp(scaled[i] - best), 100)) for i in order]
        total, mass = sum(weights), 0
        share = Fraction(top_p) * total
        for n, weight in enumerate(weights):
            mass += weight
            if weight != weights[0] and abs(mass / total - top_p) < 1e-8:
                return None
            if mass >= share:
                return order[: n + 1]
    return order


def reference_gumbel(seed, position, token):
    low, high = split64(position)
    bits = philox4x32((token // 4, low, high, int(Purpose.COUPLED)), split64(seed))[token % 4]
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def reference_token(scaled, kept, seed, position):
    return max(kept, key=lambda i: (scaled[i] + reference_gumbel(seed, position, i), -i))


# --- the pieces ---


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_row_max_and_row_top_break_ties_to_the_lower_column(pattern, repeats, dtype):
    width = max(len(row) for row in pattern)
    x = torch.tensor([(row * width)[:width] * repeats for row in pattern], dtype=dtype)
    x[x == -3] = -INF
    x[x == 3] = -0.0
    values, columns = row_max(x)
    count = max(1, x.shape[1] // 2)
    top_values, top_columns = row_top(x, count)
    for r, row in enumerate(x.tolist()):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert (values[r].item(), columns[r].item()) == (row[order[0]], order[0])
        assert top_values[r].tolist() == [row[i] for i in order[:count]]
        finite = [i for i in order[:count] if row[i] > -INF]
        assert top_columns[r].tolist()[: len(finite)] == finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_top_is_the_stable_sort(dtype):
    x = torch.randn(20, 3001, generator=torch.Generator().manual_seed(0)).mul_(8).round_().div_(4).to(dtype)
    expected = x.sort(dim=1, descending=True, stable=True)
    for count in (1, 64, 700, 3001):
        values, columns = row_top(x, count)
        assert torch.equal(values, expected.values[:, :count])
        assert torch.equal(columns, expected.indices[:, :count])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 5.0, 60.0])
def test_race_is_the_argmax_of_scores(spread, dtype):
    generator = torch.Generator().manual_seed(int(spread * 1000))
    scaled = (torch.randn(40, 1000, generator=generator, dtype=torch.float64) * spread).to(dtype)
    scaled[:, 7] = -INF
    scaled[3] = -INF
    scaled[4, 1:] = -INF
    scaled[5, 0] = 40.0
    seed, position = torch.arange(40) * 2**35 - 2**40, torch.arange(40) + 2**33
    (score, _), token = gumbel_max(scaled, 5, seed, position)
    for r in range(40):
        if r == 3:
            assert score[r] == -INF
            continue
        values = scaled[r].double().tolist()
        ids = range(1000)
        expected = max(
            ids, key=lambda i: (values[i] + reference_gumbel(int(seed[r]), int(position[r]), i + 5), -i)
        )
        assert token[r].item() == expected + 5
        exact = values[expected] + reference_gumbel(int(seed[r]), int(position[r]), expected + 5)
        assert score[r].item() == pytest.approx(exact, rel=1e-12)


grid = st.integers(-8, 4).map(lambda n: n / 2)
any_float = st.floats(-30, 30, width=32)


@st.composite
def filter_cases(draw):
    size = draw(st.sampled_from([1, 2, 4]))
    vocab = draw(st.integers(1, 30))
    value = draw(st.sampled_from([grid, any_float]))
    logits = draw(st.lists(st.one_of(value, st.just(-INF)), min_size=vocab, max_size=vocab))
    assume(max(logits) > -INF)
    top_k = draw(st.sampled_from([0, 1, 2, 3, 7, vocab, vocab + 5, 10**6]))
    top_p = draw(st.one_of(st.sampled_from([1.0, 0.5, 1e-6, 1 - 1e-9]), st.floats(0.01, 0.99)))
    min_p = draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-3]), st.floats(0.01, 0.99)))
    return size, logits, top_k, top_p, min_p


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(filter_cases(), st.sampled_from([torch.float32, torch.float64]), st.integers(-(2**63), 2**63 - 1))
@example((4, [0.5], 0, 1e-6, 0.0), torch.float32, 1)
@example((4, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 4, 0.5, 1.0), torch.float32, -1)
@example((2, [-INF, -INF, 3.0], 10**6, 0.999999, 0.5), torch.float64, 0)
def test_cuts_and_tokens_equal_the_full_sort(case, dtype, seed):
    size, logits, top_k, top_p, min_p = case
    kept = reference_kept(logits, top_k, top_p, min_p)
    assume(kept is not None)
    scaled = torch.tensor([logits], dtype=dtype)
    cuts = make_rows(1, top_k=top_k, top_p=top_p, min_p=min_p).cuts()
    for survivors in on_ranks(scaled, size, lambda x, start, comm: surviving(x, start, cuts, comm)):
        assert survivors.token.tolist() == kept
        assert survivors.value.tolist() == [logits[i] for i in kept]
    rows = make_rows(1, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=11)
    assert sample_on(scaled, rows, size).tokens.item() == reference_token(logits, kept, seed, 11)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_cuts_are_exact_and_do_not_disturb_other_rows(size, dtype):
    """Flat rows, nuclei of thousands and a large top-k beside peaked rows: the heads must grow."""
    vocab = 2999
    generator = torch.Generator().manual_seed(3)
    logits = (
        torch.randn(8, vocab, generator=generator, dtype=torch.float64).mul_(2).round_(decimals=3).to(dtype)
    )
    logits[0] = 1.25
    logits[1] = torch.arange(vocab) % 3
    logits[2] *= 5
    top_p = [0.37, 0.9, 0.9, 0.999, 1.0, 0.95, 1.0, 0.8]
    top_k = [0, 0, 0, 0, 2500, 700, 0, 5000]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-3, 1e-4]
    rows = make_rows(8, top_k=top_k, top_p=top_p, min_p=min_p, seed=torch.arange(8) + 70, position=5)
    cuts = rows.cuts()
    survivors = on_ranks(logits, size, lambda x, start, comm: surviving(x, start, cuts, comm))[0]
    tokens = sample_on(logits, rows, size).tokens
    for r in range(8):
        values = logits[r].double().tolist()
        kept = reference_kept(values, top_k[r], top_p[r], min_p[r])
        assert kept is not None
        assert survivors.token[survivors.row == r].tolist() == kept
        assert tokens[r].item() == reference_token(values, kept, 70 + r, 5)


def test_top_p_of_a_flat_row_keeps_the_lowest_ids():
    logits = torch.zeros(1, 4000)
    cuts = Cuts(top_k=torch.zeros(1, dtype=torch.int64), top_p=torch.tensor([0.25]), min_p=torch.zeros(1))
    assert surviving(logits, 0, cuts, SoloCollectives()).token.tolist() == list(range(1000))


# --- whole calls ---


def mixed_rows(num_rows):
    r = torch.arange(num_rows)
    return make_rows(
        num_rows,
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0, 1.0])[r % 7].double(),
        top_k=torch.tensor([0, 0, 0, 5, 0, 0, 40])[r % 7],
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 0.99, 0.5])[r % 7],
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.0])[r % 7],
        seed=r * 2**40 - 2**44,
        position=r * 3,
        num_logprobs=3,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_one_answer_alone_in_any_batch_and_on_any_number_of_ranks(dtype):
    logits = (
        torch.randn(21, 1003, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        .mul_(3)
        .to(dtype)
    )
    before = logits.clone()
    rows = mixed_rows(21)
    together = sample_on(logits, rows)
    assert torch.equal(logits, before)
    for size in (2, 4):
        sharded = sample_on(logits, rows, size)
        assert torch.equal(sharded.tokens, together.tokens)
        assert torch.equal(sharded.logprobs.top_ids, together.logprobs.top_ids)
        torch.testing.assert_close(sharded.logprobs.sampled, together.logprobs.sampled)
    for r in range(21):
        alone = sample_on(logits[r : r + 1], pick(rows, slice(r, r + 1)))
        assert alone.tokens[0] == together.tokens[r]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(6))
    assert torch.equal(sample_on(logits[order], pick(rows, order)).tokens, together.tokens[order])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_greedy_takes_the_lowest_of_the_best(size):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -1.0, 2.0], [-5.0, -5.0, -5.0, -5.0, -5.0, -5.0]])
    assert sample_on(logits, make_rows(2, temperature=0.0), size).tokens.tolist() == [1, 0]
    assert sample_on(logits, make_rows(2, temperature=[0.0, 2.0], top_k=[0, 1]), size).tokens.tolist() == [
        1,
        0,
    ]


def test_no_rows():
    result = sample_on(torch.empty(0, 8), make_rows(0, num_logprobs=2), 2)
    assert result.tokens.shape == (0,)
    assert result.logprobs.top_ids.shape == (0, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}])
def test_nan_and_infinity_are_never_chosen(size, options):
    clean = torch.tensor([[1.0, -INF, 0.5, -INF, 1.5]]).expand(50, 5)
    dirty = torch.tensor([[1.0, math.nan, 0.5, INF, 1.5]]).expand(50, 5)
    rows = make_rows(50, seed=torch.arange(50), **options)
    expected = sample_on(clean, rows, size).tokens
    assert set(expected.tolist()) <= {0, 2, 4}
    assert torch.equal(sample_on(dirty, rows, size).tokens, expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 20), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_logprobs_are_those_of_the_raw_logits(vocab, num_top, size, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator).mul_(4).round_().double()
    rows = make_rows(
        6, temperature=[0.0, 1.0, 0.5, 2.0, 1.0, 1.0], top_k=[0, 0, 0, 3, 0, 2], num_logprobs=num_top
    )
    result = sample_on(logits, rows, size)
    expected = logits.log_softmax(dim=1)
    torch.testing.assert_close(result.logprobs.sampled, expected.gather(1, result.tokens.unsqueeze(1))[:, 0])
    shown = min(num_top, vocab)
    for r, row in enumerate(expected.tolist()):
        order = sorted(range(vocab), key=lambda i: (-row[i], i))[:shown]
        assert result.logprobs.top_ids[r].tolist() == order + [-1] * (num_top - shown)
        assert result.logprobs.top_values[r].tolist()[:shown] == pytest.approx([row[i] for i in order])
    assert (result.logprobs.top_values[:, shown:] == -INF).all()


# --- distributions ---


def exact_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    scaled = [x / temperature for x in logits]
    kept = reference_kept(scaled, top_k, top_p, min_p)
    weights = np.zeros(len(logits))
    weights[kept] = np.exp([scaled[i] for i in kept])
    return weights / weights.sum()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 1.4, "top_p": 0.85},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 10, "min_p": 0.08},
    {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]
LOGITS = torch.randn(25, generator=torch.Generator().manual_seed(11), dtype=torch.float64).mul_(1.5).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_follow_the_exact_distribution(options, vary):
    draws = 20_000
    rows = make_rows(draws, **{vary: torch.arange(draws)}, **options)
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(draws, -1)
    counts = np.bincount(sample_on(logits, rows).tokens.numpy(), minlength=len(LOGITS))
    exact = exact_probabilities(LOGITS, **options)
    assert counts[exact == 0].sum() == 0
    assert stats.chisquare(counts[exact > 0], draws * exact[exact > 0]).pvalue > 0.001


@pytest.mark.parametrize(
    "step", [{"position": 1}, {"seed": 1}, {"seed": 2**32}, {"position": 2**32}], ids=str
)
def test_neighbouring_positions_and_seeds_are_independent(step):
    draws = 20_000
    logits = torch.tensor([[0.3, 0.0, -0.4, 0.8, 0.1]]).expand(draws, -1)
    base = {"seed": torch.arange(draws) * 1000, "position": torch.arange(draws) * 7}
    moved = {name: value + step.get(name, 0) for name, value in base.items()}
    first = sample_on(logits, make_rows(draws, **base)).tokens.numpy()
    second = sample_on(logits, make_rows(draws, **moved)).tokens.numpy()
    table = np.zeros((5, 5))
    np.add.at(table, (first, second), 1)
    exact = np.outer(*[np.exp(logits[0].double().numpy())] * 2)
    assert stats.chisquare(table.ravel(), (draws * exact / exact.sum()).ravel()).pvalue > 0.001


def test_the_same_noise_couples_draft_and_target():
    draws = 20_000
    target = torch.tensor([LOGITS]).expand(draws, -1)
    rows = make_rows(draws, seed=torch.arange(draws))
    tokens = sample_on(target, rows).tokens
    for strength in (0.0, 0.2, 0.7, 1.5):
        shift = torch.randn(len(LOGITS), generator=torch.Generator().manual_seed(4)) * strength
        draft = target + shift
        agreement = (sample_on(draft, rows).tokens == tokens).double().mean().item()
        p, q = target[0].double().softmax(0), draft[0].double().softmax(0)
        distance = (p - q).abs().sum().item() / 2
        error = 4 * math.sqrt(0.25 / draws)
        # Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative
        # decoding": Gumbel coupling agrees with at least (1 - TV) / (1 + TV); no coupling beats 1 - TV.
        assert (1 - distance) / (1 + distance) - error <= agreement <= 1 - distance + error
        # Exact: token i wins both races with probability 1 / sum_j max(p_j / p_i, q_j / q_i).
        ratio = torch.maximum(p.unsqueeze(0) / p.unsqueeze(1), q.unsqueeze(0) / q.unsqueeze(1))
        assert agreement == pytest.approx((1 / ratio.sum(dim=1)).sum().item(), abs=error)
        if strength == 0.0:
            assert agreement == 1.0
