import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_integration.errors import PlanError
from kernels_integration.plan import SparseMLAPlan, _plan_split, build_plan, plan_from_indptr, validate_plan
from kernels_integration.planner import StepPlanner
from kernels_integration.selection import Selection
from tests.support.plan_reference import plan_serially

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "plan_vectors.json").read_text())["vectors"]
ARRAYS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")

lengths = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from([0, 16, 17, 64, 2048]), st.integers(0, 6000)), max_size=24
)
part_counts = st.one_of(st.integers(1, 12), st.sampled_from([64, 256]))


def indptr_of(kv_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *kv_lens]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["name"])
def test_golden_vectors(vector):
    plan = build_plan(vector["kv_lens"], vector["num_parts"])
    expected = dict(vector)
    expected["reduce_final_map"] = [entry or [-1, -1] for entry in vector["reduce_final_map"]]
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == {
        name: expected[name] for name in ARRAYS
    }


@given(kv_lens=lengths, num_parts=part_counts)
@settings(max_examples=150, deadline=None)
def test_equals_the_serial_planner(kv_lens, num_parts):
    plan = build_plan(kv_lens, num_parts)
    expected = plan_serially(kv_lens, num_parts)
    for name in ARRAYS:
        assert getattr(plan, name).tolist() == getattr(expected, name), name
        assert getattr(plan, name).dtype == torch.int32, name
    assert plan.num_partial_rows == len(expected.reduce_partial_map)
    assert len(expected.work_info) <= max(0, len(kv_lens) + num_parts - 1)
    assert plan.num_partial_rows <= min(len(kv_lens) + num_parts - 1, 2 * (num_parts - 1))
    validate_plan(plan)


@pytest.mark.parametrize("num_parts", [1, 4, 200])
def test_shapes_on_a_device_depend_on_no_length(num_parts):
    """A meta tensor has no values: an operation that needs one on the host fails."""
    rows = 5
    plan = plan_from_indptr(torch.empty(rows + 1, dtype=torch.int32, device="meta"), num_parts)
    assert plan.work_info.shape == (rows + num_parts - 1, 8)
    assert plan.work_indptr.shape == (num_parts + 1,)
    assert plan.reduce_indptr.shape == (rows + 1,)
    assert plan.reduce_final_map.shape == (rows, 2)
    assert plan.reduce_partial_map.shape == (min(rows + num_parts - 1, 2 * (num_parts - 1)),)
    assert plan.num_partial_rows == plan.reduce_partial_map.shape[0]


@given(kv_lens=lengths.filter(bool), num_parts=st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_the_fixed_shapes_of_a_device_hold_the_same_plan(kv_lens, num_parts):
    """What a device runs, run on the CPU: the arrays are equal as far as used, unused items are zero."""
    fixed = _plan_split(indptr_of(kv_lens), num_parts, None)
    plan = build_plan(kv_lens, num_parts)
    for name in ARRAYS:
        used = getattr(plan, name)
        assert torch.equal(getattr(fixed, name)[: len(used)], used)
    assert not fixed.work_info[len(plan.work_info) :].any()
    validate_plan(fixed)


def test_all_forms_of_lengths_give_the_same_plan():
    kv_lens = [5, 0, 4000, 64]
    plan = build_plan(kv_lens, 4)
    for same in (
        build_plan(torch.tensor(kv_lens), 4),
        build_plan(torch.tensor(kv_lens, dtype=torch.int32), 4),
        plan_from_indptr(indptr_of(kv_lens), 4),
        plan_from_indptr(indptr_of(kv_lens).long(), 4),
    ):
        assert all(torch.equal(getattr(plan, name), getattr(same, name)) for name in (*ARRAYS, "kv_indptr"))


def test_no_rows():
    for num_parts in (1, 3):
        plan = build_plan([], num_parts)
        validate_plan(plan)
        assert plan.work_indptr.tolist() == [0] * (num_parts + 1)


def test_bad_arguments_are_refused():
    with pytest.raises(PlanError, match="num_parts 0"):
        build_plan([3], 0)
    with pytest.raises(PlanError, match="-2 of row 1"):
        build_plan([3, -2], 1)
    with pytest.raises(PlanError, match="kv_indptr of 3 rows for a plan of 2"):
        build_plan([3, 2], 1).with_indices(torch.zeros(5), torch.zeros(4))


def changed(tensor: torch.Tensor, index, value) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def sound_plan() -> SparseMLAPlan:
    """Rows of 5, 0 and 4000 tokens: items 0 and 1 whole, row 2 split into items 2..5."""
    return build_plan([5, 0, 4000], 4, kv_indices=torch.arange(4005))


def drop_item(plan: SparseMLAPlan, item: int) -> SparseMLAPlan:
    return replace(
        plan,
        work_info=torch.cat((plan.work_info[:item], plan.work_info[item + 1 :])),
        work_indptr=plan.work_indptr - (plan.work_indptr > item).int(),
    )


def repeat_item(plan: SparseMLAPlan, item: int) -> SparseMLAPlan:
    return replace(
        plan,
        work_info=torch.cat((plan.work_info[: item + 1], plan.work_info[item:])),
        work_indptr=plan.work_indptr + (plan.work_indptr > item).int(),
    )


def with_info(item: int, column: int, value: int):
    return lambda plan: replace(plan, work_info=changed(plan.work_info, (item, column), value))


def with_array(name: str, index, value):
    return lambda plan: replace(plan, **{name: changed(getattr(plan, name), index, value)})


def swap_parts(plan: SparseMLAPlan) -> SparseMLAPlan:
    return replace(plan, work_info=plan.work_info[[0, 1, 3, 2, 4, 5]])


MUTATIONS = {
    "gap between parts": (1, with_info(3, 4, 678)),
    "overlap of parts": (1, with_info(3, 4, 676)),
    "tail not covered": (1, with_info(5, 5, 4004)),
    "wrong kv_offset": (1, with_info(3, 6, 0)),
    "parts out of order": (1, swap_parts),
    "row starts early": (1, with_info(2, 4, 4)),
    "part dropped": (1, lambda plan: drop_item(plan, 3)),
    "row dropped": (2, lambda plan: drop_item(plan, 0)),
    "row twice": (2, lambda plan: repeat_item(plan, 0)),
    "q range of another row": (2, with_info(0, 2, 1)),
    "q range of two rows": (2, with_info(0, 3, 2)),
    "direct write of a split row": (2, with_info(3, 1, -1)),
    "partial write of a whole row": (2, with_info(0, 1, 4)),
    "no merge of a split row": (3, with_array("reduce_indptr", 3, 0)),
    "merge of an unsplit row": (3, with_array("reduce_indptr", slice(1, 3), 1)),
    "merge writes another row": (3, with_array("reduce_final_map", 2, 1)),
    "merge reads another part": (3, with_array("reduce_partial_map", 1, 0)),
    "merge map without a row": (3, lambda plan: replace(plan, reduce_final_map=plan.reduce_final_map[:2])),
    "shared partial row": (
        3,
        lambda plan: with_array("reduce_partial_map", 1, 0)(with_info(3, 1, 0)(plan)),
    ),
    "too few partial rows": (4, lambda plan: replace(plan, num_partial_rows=3)),
    "item past the rows": (4, with_info(5, 0, 3)),
    "q range past the rows": (4, with_info(5, 3, 4)),
    "negative row": (4, with_info(0, 0, -1)),
    "KV past the plan": (4, with_info(5, 5, 4006)),
    "negative KV": (4, with_info(0, 4, -1)),
    "padded rows": (4, lambda plan: replace(plan, rows=4)),
    "kv_indptr falls": (4, with_array("kv_indptr", 2, 4)),
    "kv_indptr starts late": (4, with_array("kv_indptr", 0, 1)),
    "work_indptr falls": (4, with_array("work_indptr", 1, 5)),
    "work_indptr too short": (4, lambda plan: replace(plan, work_indptr=plan.work_indptr[:-1])),
    "work_info too short": (4, lambda plan: replace(plan, work_info=plan.work_info[:-1])),
    "reduce map too short": (4, lambda plan: replace(plan, reduce_partial_map=plan.reduce_partial_map[:-1])),
    "kv_indices too short": (4, lambda plan: plan.with_indices(torch.arange(4004))),
    "hole in kv_indices": (4, with_array("kv_indices", 7, -1)),
    "slot past the cache": (4, with_array("kv_indices", 7, 5000)),
    "empty row twice": (5, lambda plan: repeat_item(plan, 1)),
    "empty part": (5, with_info(3, 5, 677)),
}


def test_a_sound_plan_validates():
    validate_plan(sound_plan(), num_slots=5000)
    validate_plan(sound_plan().with_indices(torch.arange(9000)), num_slots=5000)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_invariant_is_refused_by_its_number(name):
    number, mutate = MUTATIONS[name]
    with pytest.raises(PlanError, match=rf"invariant {number} "):
        validate_plan(mutate(sound_plan()), num_slots=5000)


def test_rows_may_be_spread_over_workers_in_another_order():
    """Another device may place whole rows differently: the invariants bind only the order inside a row."""
    plan = build_plan([32, 17, 32, 20], 4)
    assert plan.work_indptr.tolist() == [0, 1, 2, 3, 4]
    validate_plan(replace(plan, work_info=plan.work_info.flip(0)))


def selection(kv_lens: list[int], first_slot: int = 0) -> Selection:
    kv_indptr = indptr_of(kv_lens)
    return Selection(kv_indptr=kv_indptr, kv_indices=torch.arange(int(kv_indptr[-1])) + first_slot)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_equal_lengths_share_the_split_and_keep_their_own_indices(num_parts):
    planner = StepPlanner(num_parts, reuse_split=True)
    first, second = selection([5, 0, 700]), selection([5, 0, 700], first_slot=100)
    plan, again = planner.plan(first), planner.plan(second)
    assert again.work_info is plan.work_info
    assert again.kv_indices is second.kv_indices
    assert plan.kv_indices is first.kv_indices


@pytest.mark.parametrize("reuse_split", [True, False])
def test_every_selection_gets_a_plan_of_its_own_lengths(reuse_split):
    planner = StepPlanner(4, reuse_split=reuse_split)
    for kv_lens in ([5, 0, 700], [5, 0, 699], [64, 64], [5, 0, 700], [5, 0, 700]):
        chosen = selection(kv_lens)
        plan, expected = planner.plan(chosen), build_plan(kv_lens, 4)
        assert all(torch.equal(getattr(plan, name), getattr(expected, name)) for name in ARRAYS)
        assert plan.kv_indices is chosen.kv_indices
        validate_plan(plan)


def test_layers_that_share_a_selection_share_the_plan():
    planner = StepPlanner(4, reuse_split=False)
    chosen = selection([5, 0, 700])
    assert planner.plan(chosen) is planner.plan(chosen)
    assert planner.plan(selection([5, 0, 700])) is not planner.plan(chosen)


def test_lengths_on_a_device_are_not_compared():
    planner = StepPlanner(4, reuse_split=True)
    kv_indptr = torch.empty(4, dtype=torch.int32, device="meta")
    first, second = (
        Selection(kv_indptr=kv_indptr, kv_indices=torch.empty(9, device="meta")) for _ in range(2)
    )
    other = Selection(kv_indptr=kv_indptr.clone(), kv_indices=torch.empty(9, device="meta"))
    plan = planner.plan(first)
    assert planner.plan(second).work_info is plan.work_info
    assert planner.plan(other).work_info is not plan.work_info
