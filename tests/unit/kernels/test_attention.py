from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan, build_plan
from kernels_integration.plan_check import validate_plan
from kernels_integration.reference import attention
from kernels_integration.reference.attention import run, run_work_items

H, C, R = 3, 16, 8
SCALE = 0.2
SENTINEL = 777.0
BACKENDS = [run, run_work_items]
both = pytest.mark.parametrize("attend", BACKENDS, ids=lambda function: function.__name__)


class Case:
    """Random rows over random slots of a cache whose unselected slots hold NaN."""

    def __init__(
        self,
        kv_lens: list[int],
        num_parts: int = 1,
        *,
        dtype: torch.dtype = torch.float64,
        num_slots: int = 300,
        index_dtype: torch.dtype = torch.int32,
        spare_rows: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_lens, self.rows = kv_lens, len(kv_lens)
        slots = [torch.randperm(num_slots, generator=generator)[:length] for length in kv_lens]
        kv_indices = torch.cat([*slots, torch.zeros(0, dtype=torch.int64)]).to(index_dtype)
        self.plan = build_plan(kv_lens, num_parts, kv_indices=kv_indices)
        validate_plan(self.plan, num_slots=num_slots)
        self.kv = torch.full((num_slots, C + R), float("nan"), dtype=dtype)
        chosen = kv_indices.unique().long()
        self.kv[chosen] = torch.randn(len(chosen), C + R, generator=generator, dtype=torch.float64).to(dtype)
        all_rows = self.rows + spare_rows
        self.q = torch.randn(all_rows, H, C + R, generator=generator, dtype=torch.float64).to(dtype)
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.o = torch.full((all_rows, H, C), SENTINEL, dtype=dtype)
        self.lse = torch.full((all_rows, H), SENTINEL, dtype=self.exact)

    @property
    def stored(self) -> StoredVectors:
        return StoredVectors.plain(self.kv)

    def outputs(self, attend, **changes) -> tuple[Tensor, Tensor]:
        arguments = {
            "plan": self.plan,
            "q": self.q,
            "kv": self.stored,
            "o": self.o.clone(),
            "lse": self.lse.clone(),
        }
        arguments |= changes
        attend(*arguments.values(), sm_scale=SCALE)
        return arguments["o"], arguments["lse"]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Row by row, head by head, in float64."""
        o = torch.zeros(self.rows, H, C, dtype=torch.float64)
        lse = torch.full((self.rows, H), -float("inf"), dtype=torch.float64)
        starts = [0, *accumulate(self.kv_lens)]
        for t in range(self.rows):
            kv = self.kv[self.plan.kv_indices[starts[t] : starts[t + 1]].long()].double()
            for h in range(H if len(kv) else 0):
                scores = kv @ self.q[t, h].double() * SCALE
                weights = scores.exp()
                o[t, h] = weights @ kv[:, :C] / weights.sum()
                lse[t, h] = weights.sum().log()
        return o, lse

    def check(self, attend, tolerance: float) -> None:
        o, lse = self.outputs(attend)
        expected_o, expected_lse = self.expected()
        torch.testing.assert_close(o[: self.rows].double(), expected_o, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[: self.rows].double(), expected_lse, atol=tolerance, rtol=tolerance)
        assert (o[self.rows :] == SENTINEL).all()
        assert (lse[self.rows :] == SENTINEL).all()


@both
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize(
    "kv_lens",
    [[12] * 5, [5, 0, 40, 1], [0, 0], [0], [1], [0, 3, 0], [290, 2, 290], list(range(20))],
    ids=lambda kv_lens: "-".join(map(str, kv_lens)) if len(kv_lens) < 6 else "ascending",
)
def test_equals_brute_force(attend, kv_lens, dtype, tolerance):
    for num_parts in (1, 4):
        Case(kv_lens, num_parts, dtype=dtype).check(attend, tolerance)


@given(
    kv_lens=st.one_of(
        st.lists(st.integers(0, 60), max_size=12),
        st.builds(lambda rows, length: [length] * rows, st.integers(1, 12), st.integers(1, 60)),
    ),
    num_parts=st.integers(1, 20),
    tile_tokens=st.integers(1, 200),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_tiling_and_any_split_agree(kv_lens, num_parts, tile_tokens, index_dtype, seed):
    case = Case(kv_lens, num_parts, index_dtype=index_dtype, spare_rows=2, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_TILE_BYTES", tile_tokens * (C + R) * 8)
        case.check(run, 1e-11)
    case.check(run_work_items, 1e-11)


def test_split_rows_merge():
    case = Case([5, 0, 4000, 700], 7, num_slots=5000)
    assert case.plan.split.num_partial_rows > 0
    case.check(run_work_items, 1e-11)
    case.check(run, 1e-11)


def test_equals_torch_scaled_dot_product_attention():
    """An implementation that shares nothing with ours; rows padded to the longest, with a mask."""
    kv_lens = [7, 64, 1, 33]
    case = Case(kv_lens, dtype=torch.float32)
    indices = case.plan.kv_indices.split(kv_lens)
    kv = torch.nn.utils.rnn.pad_sequence([case.kv[row.long()] for row in indices], batch_first=True)
    mask = torch.arange(64) < torch.tensor(kv_lens)[:, None]
    q = case.q.unsqueeze(2)
    kv = kv.unsqueeze(1).expand(-1, H, -1, -1)
    expected = F.scaled_dot_product_attention(q, kv, kv[..., :C], mask[:, None, None], scale=SCALE).squeeze(2)
    for attend in BACKENDS:
        torch.testing.assert_close(case.outputs(attend)[0], expected, atol=1e-5, rtol=1e-5)


@both
def test_any_head_count(attend):
    case = Case([5, 0, 40], 3)
    for heads in (1, 128):
        q = torch.randn(3, heads, C + R, dtype=torch.float64)
        o, lse = torch.zeros(3, heads, C).double(), torch.zeros(3, heads).double()
        attend(case.plan, q, case.stored, o, lse, sm_scale=SCALE)
        one_o, one_lse = torch.zeros(3, 1, C).double(), torch.zeros(3, 1).double()
        attend(case.plan, q[:, -1:], case.stored, one_o, one_lse, sm_scale=SCALE)
        torch.testing.assert_close(o[:, -1:], one_o)
        torch.testing.assert_close(lse[:, -1:], one_lse)


@both
@pytest.mark.parametrize("kv_lens", [[9] * 4, [5, 0, 40, 1]], ids=["uniform", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_into_larger_buffers(attend, kv_lens, dtype):
    """q, o and lse end at exactly the real rows; what lies around them is poisoned and must stay so."""
    case = Case(kv_lens, 3, dtype=dtype)
    rows = case.rows
    q_buffer = torch.full((rows + 4, H + 2, C + R + 1), float("nan"), dtype=dtype)
    o_buffer = torch.full((rows + 4, H + 2, C + 5), SENTINEL, dtype=dtype)
    lse_buffer = torch.full((rows + 4, H + 2), SENTINEL)
    kv_buffer = torch.full((case.kv.shape[0], 2, C + R), float("nan"), dtype=dtype)
    rows_, heads = slice(2, rows + 2), slice(1, H + 1)
    q, kv = q_buffer[rows_, heads, 1:], kv_buffer[:, 1]
    o, lse = o_buffer[rows_, heads, 2 : C + 2], lse_buffer[rows_, heads]
    q.copy_(case.q)
    kv.copy_(case.kv)
    attend(case.plan, q, StoredVectors.plain(kv), o, lse, sm_scale=SCALE)
    expected_o, expected_lse = case.outputs(attend)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(lse, expected_lse)
    o.fill_(SENTINEL)
    lse.fill_(SENTINEL)
    assert (o_buffer == SENTINEL).all()
    assert (lse_buffer == SENTINEL).all()


@both
@pytest.mark.parametrize("kv_lens", [[9] * 4, [5, 0, 40, 1]], ids=["uniform", "ragged"])
def test_rows_beyond_the_plan_are_neither_read_nor_written(attend, kv_lens):
    case = Case(kv_lens, 3, spare_rows=3)
    case.q[case.rows :] = float("nan")
    case.check(attend, 1e-12)


@both
def test_a_row_without_kv_ignores_even_a_poisoned_query(attend):
    case = Case([5, 0, 7])
    case.q[1] = float("nan")
    o, lse = case.outputs(attend)
    assert not o[1].any()
    assert (lse[1] == -float("inf")).all()
    assert o.isfinite().all()


@both
def test_poisoned_kv_of_one_row_stays_in_that_row(attend):
    """Rows padded to the longest of their tile share a product; its neighbours must not see the NaN."""
    case = Case([3, 40, 0, 5])
    starts = case.plan.kv_indptr.tolist()
    own = set(case.plan.kv_indices[starts[1] : starts[2]].tolist())
    others = {*case.plan.kv_indices[: starts[1]].tolist(), *case.plan.kv_indices[starts[2] :].tolist()}
    case.kv[list(own - others)] = float("nan")
    o, _ = case.outputs(attend)
    assert o[1].isnan().all()
    assert o[[0, 2, 3]].isfinite().all()


@both
def test_large_scores_do_not_overflow(attend):
    case = Case([30, 4, 30], dtype=torch.float32)
    case.q *= 1000
    o, lse = case.outputs(attend)
    scores = torch.einsum("hw,lw->hl", case.q[0], case.kv[case.plan.kv_indices[:30].long()]).double() * SCALE
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=1e-5, atol=0)
    assert o.isfinite().all()


@both
def test_a_plan_over_padded_rows_is_refused_before_anything_is_written(attend):
    """39 requests of 4 rows padded to 40: the fault that the plan contract describes."""
    padded = Case([4] * 156 + [0] * 4)
    q, o, lse = padded.q[:156], padded.o[:156], padded.lse[:156]
    with pytest.raises(PlanError, match="plan of 160 rows for q of 156"):
        attend(padded.plan, q, padded.stored, o, lse, sm_scale=SCALE)
    assert (padded.o == SENTINEL).all()
    assert (padded.lse == SENTINEL).all()


def with_slots(plan: SparseMLAPlan, count: int) -> SparseMLAPlan:
    """As a plan looks whose slots were changed behind its back."""
    return replace(plan, kv_indices=torch.arange(count))


def without_indices(plan: SparseMLAPlan) -> SparseMLAPlan:
    return build_plan([4, 4], plan.split.num_parts)


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda case: case.q[:1]}, "q of 1"),
        ({"o": lambda case: case.o[:1]}, "o of 1"),
        ({"lse": lambda case: case.lse[:1]}, "lse of 1"),
        ({"q": lambda case: case.q.repeat(2, 1, 1)}, "q of 4"),
        ({"o": lambda case: case.o.repeat(2, 1, 1)}, "o of 4"),
        ({"q": lambda case: case.q[:, :2]}, "heads"),
        ({"lse": lambda case: case.lse[:, :2]}, "heads"),
        ({"q": lambda case: case.q[..., :-1]}, "width"),
        ({"kv": lambda case: StoredVectors.plain(case.kv[:, :-1])}, "width"),
        ({"lse": lambda case: case.lse.float()}, "float64"),
        ({"plan": lambda case: without_indices(case.plan)}, "with_indices"),
        ({"plan": lambda case: with_slots(case.plan, 7)}, "kv_indices of 7 entries for a plan of 8"),
        ({"plan": lambda case: with_slots(case.plan, 0)}, "kv_indices of 0 entries for a plan of 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(attend, changes, message):
    case = Case([4, 4])
    changed = {name: change(case) for name, change in changes.items()}
    o = changed.setdefault("o", case.o)
    with pytest.raises(PlanError, match=message):
        case.outputs(attend, **changed)
    assert (o == SENTINEL).all()
    assert (case.lse == SENTINEL).all()


def test_tiles_stay_within_the_memory_budget():
    """2048 prefill rows of up to 64 tokens and one dense row: no tile gathers more than its budget."""
    lens = [min(position + 1, 64) for position in range(2048)]
    for kv_lens in (lens, [64] * 2048, [8192, *lens, 8192]):
        indptr = [0, *accumulate(kv_lens)]
        tiles = list(attention._row_tiles(indptr, 1024))
        assert [row for first, end, _ in tiles for row in range(first, end)] == list(range(len(kv_lens)))
        for first, end, longest in tiles:
            assert longest == max(kv_lens[first:end])
            assert (end - first) * longest <= 1024 or end - first == 1
