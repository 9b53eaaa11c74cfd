import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_integration.errors import PlanError
from kernels_integration.plan import SparseMLAPlan, build_plan, plan_from_indptr, split_rows
from kernels_integration.plan_check import validate_plan
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
    split = build_plan(vector["kv_lens"], vector["num_parts"]).split
    expected = dict(vector)
    expected["reduce_final_map"] = [entry or [-1, -1] for entry in vector["reduce_final_map"]]
    assert {name: getattr(split, name).tolist() for name in ARRAYS} == {
        name: expected[name] for name in ARRAYS
    }


@given(kv_lens=lengths, num_parts=part_counts)
@settings(max_examples=150, deadline=None)
def test_equals_the_serial_planner(kv_lens, num_parts):
    plan = build_plan(kv_lens, num_parts)
    expected = plan_serially(kv_lens, num_parts)
    for name in ARRAYS:
        assert getattr(plan.split, name).tolist() == getattr(expected, name), name
        assert getattr(plan.split, name).dtype == torch.int32, name
    assert plan.split.num_partial_rows == len(expected.reduce_partial_map)
    assert len(expected.work_info) <= max(0, len(kv_lens) + num_parts - 1)
    assert plan.split.num_partial_rows <= min(len(kv_lens) + num_parts - 1, 2 * (num_parts - 1))
    validate_plan(plan)


@pytest.mark.parametrize("num_parts", [1, 4, 200])
def test_shapes_on_a_device_depend_on_no_length(num_parts):
    """A meta tensor has no values: an operation that needs one on the host fails."""
    rows = 5
    indptr = torch.empty(rows + 1, dtype=torch.int32, device="meta")
    split = plan_from_indptr(indptr, num_parts, kv_bound=100).split
    assert split.work_info.shape == (rows + num_parts - 1, 8)
    assert split.work_indptr.shape == (num_parts + 1,)
    assert split.reduce_indptr.shape == (rows + 1,)
    assert split.reduce_final_map.shape == (rows, 2)
    assert split.reduce_partial_map.shape == (min(rows + num_parts - 1, 2 * (num_parts - 1)),)
    assert split.num_partial_rows == split.reduce_partial_map.shape[0]


@given(kv_lens=lengths.filter(bool), num_parts=st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_the_fixed_shapes_of_a_device_hold_the_same_plan(kv_lens, num_parts):
    """What a device runs, run on the CPU: the arrays are equal as far as used, unused items are zero."""
    fixed = split_rows(indptr_of(kv_lens), num_parts)
    plan = build_plan(kv_lens, num_parts)
    for name in ARRAYS:
        used = getattr(plan.split, name)
        assert torch.equal(getattr(fixed, name)[: len(used)], used)
    assert not fixed.work_info[len(plan.split.work_info) :].any()
    validate_plan(replace(plan, split=fixed))


def test_all_forms_of_lengths_give_the_same_plan():
    kv_lens = [5, 0, 4000, 64]
    plan = build_plan(kv_lens, 4)
    for same in (
        build_plan(torch.tensor(kv_lens), 4),
        build_plan(torch.tensor(kv_lens, dtype=torch.int32), 4),
        plan_from_indptr(indptr_of(kv_lens), 4),
        plan_from_indptr(indptr_of(kv_lens).long(), 4),
    ):
        assert torch.equal(plan.kv_indptr, same.kv_indptr)
        assert all(torch.equal(getattr(plan.split, name), getattr(same.split, name)) for name in ARRAYS)


def test_no_rows():
    for num_parts in (1, 3):
        plan = build_plan([], num_parts)
        validate_plan(plan)
        assert plan.split.work_indptr.tolist() == [0] * (num_parts + 1)


def test_bad_arguments_are_refused():
    with pytest.raises(PlanError, match="num_parts 0"):
        build_plan([3], 0)
    with pytest.raises(PlanError, match="-2 of row 1"):
        build_plan([3, -2], 1)
    with pytest.raises(PlanError, match="needs kv_indices, or kv_bound"):
        plan_from_indptr(torch.empty(3, dtype=torch.int32, device="meta"), 1)


@pytest.mark.parametrize("lens", [[2**30] * 3, [2**31 - 1, 5], [2**31], [2**70]])
@pytest.mark.parametrize("num_parts", [None, 1, 4])
def test_more_tokens_than_pointers_can_count_are_refused(lens, num_parts):
    with pytest.raises(PlanError, match="2147483647"):
        build_plan(lens, num_parts)
    if sum(lens) < 2**63:
        indptr = torch.tensor([0, *lens]).cumsum(0)
        with pytest.raises(PlanError, match="2147483647"):
            plan_from_indptr(indptr, num_parts)


@pytest.mark.parametrize(
    "lens", [[3.0], [2, 1.5], [True], torch.tensor([3.7]), torch.tensor([True]), ["3"], [None]]
)
def test_lengths_that_are_no_integers_are_refused(lens):
    with pytest.raises(PlanError, match="whole numbers"):
        build_plan(lens, 2)


@pytest.mark.parametrize("count", [0, 4, 6, 7, 9, 100])
@pytest.mark.parametrize("num_parts", [None, 1, 4])
def test_a_plan_takes_one_slot_for_each_of_its_tokens(count, num_parts):
    """Fewer would be read past their end; another number belongs to other lengths."""
    plan = build_plan([4, 4], num_parts, kv_indices=torch.arange(8))
    with pytest.raises(PlanError, match=f"kv_indices of {count} entries for a plan of 8"):
        plan.with_indices(torch.arange(count))
    assert plan.with_indices(torch.arange(8) + 5).kv_indices[0] == 5


@pytest.mark.parametrize("count", [0, 7])
def test_a_plan_is_not_made_over_too_few_slots(count):
    with pytest.raises(PlanError, match=f"kv_indices of {count} entries for a plan of 8"):
        build_plan([4, 4], 1, kv_indices=torch.arange(count))


def test_on_a_device_a_plan_takes_as_many_slots_as_its_maker_said():
    """Only the device knows how many are used: there must be room for the most."""
    plan = plan_from_indptr(torch.empty(3, dtype=torch.int32, device="meta"), 4, kv_bound=64)
    assert plan.with_indices(torch.empty(80, device="meta")).kv_indices.shape == (80,)
    with pytest.raises(PlanError, match="kv_indices of 63 entries for a plan of 64"):
        plan.with_indices(torch.empty(63, device="meta"))


def changed(tensor: torch.Tensor, index, value) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def sound_plan() -> SparseMLAPlan:
    """Rows of 5, 0 and 4000 tokens: items 0 and 1 whole, row 2 split into items 2..5."""
    return build_plan([5, 0, 4000], 4, kv_indices=torch.arange(4005))


def with_split(plan: SparseMLAPlan, **arrays) -> SparseMLAPlan:
    return replace(plan, split=replace(plan.split, **arrays))


def drop_item(plan: SparseMLAPlan, item: int) -> SparseMLAPlan:
    split = plan.split
    return with_split(
        plan,
        work_info=torch.cat((split.work_info[:item], split.work_info[item + 1 :])),
        work_indptr=split.work_indptr - (split.work_indptr > item).int(),
    )


def repeat_item(plan: SparseMLAPlan, item: int) -> SparseMLAPlan:
    split = plan.split
    return with_split(
        plan,
        work_info=torch.cat((split.work_info[: item + 1], split.work_info[item:])),
        work_indptr=split.work_indptr + (split.work_indptr > item).int(),
    )


def with_info(item: int, column: int, value: int):
    return with_array("work_info", (item, column), value)


def with_array(name: str, index, value):
    def mutate(plan: SparseMLAPlan) -> SparseMLAPlan:
        if name in ARRAYS:
            return with_split(plan, **{name: changed(getattr(plan.split, name), index, value)})
        return replace(plan, **{name: changed(getattr(plan, name), index, value)})

    return mutate


def swap_parts(plan: SparseMLAPlan) -> SparseMLAPlan:
    return with_split(plan, work_info=plan.split.work_info[[0, 1, 3, 2, 4, 5]])


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
    "merge map without a row": (
        3,
        lambda plan: with_split(plan, reduce_final_map=plan.split.reduce_final_map[:2]),
    ),
    "shared partial row": (
        3,
        lambda plan: with_array("reduce_partial_map", 1, 0)(with_info(3, 1, 0)(plan)),
    ),
    "too few partial rows": (4, lambda plan: with_split(plan, num_partial_rows=3)),
    "item past the rows": (4, with_info(5, 0, 3)),
    "q range past the rows": (4, with_info(5, 3, 4)),
    "negative row": (4, with_info(0, 0, -1)),
    "KV past the plan": (4, with_info(5, 5, 4006)),
    "negative KV": (4, with_info(0, 4, -1)),
    "padded rows": (4, lambda plan: replace(plan, rows=4)),
    "kv_indptr falls": (4, with_array("kv_indptr", 2, 4)),
    "kv_indptr starts late": (4, with_array("kv_indptr", 0, 1)),
    "work_indptr falls": (4, with_array("work_indptr", 1, 5)),
    "work_indptr too short": (4, lambda plan: with_split(plan, work_indptr=plan.split.work_indptr[:-1])),
    "work_info too short": (4, lambda plan: with_split(plan, work_info=plan.split.work_info[:-1])),
    "reduce map too short": (
        4,
        lambda plan: with_split(plan, reduce_partial_map=plan.split.reduce_partial_map[:-1]),
    ),
    "kv_indices too short": (4, lambda plan: replace(plan, kv_indices=torch.arange(4004))),
    "more KV than said": (4, lambda plan: replace(plan, kv_bound=4004)),
    "hole in kv_indices": (4, with_array("kv_indices", 7, -1)),
    "slot past the cache": (4, with_array("kv_indices", 7, 5000)),
    "empty row twice": (5, lambda plan: repeat_item(plan, 1)),
    "empty part": (5, with_info(3, 5, 677)),
}


def test_a_sound_plan_validates():
    validate_plan(sound_plan(), num_slots=5000)
    validate_plan(replace(sound_plan(), kv_indices=torch.arange(9000)), num_slots=5000)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_invariant_is_refused_by_its_number(name):
    number, mutate = MUTATIONS[name]
    with pytest.raises(PlanError, match=rf"invariant {number} "):
        validate_plan(mutate(sound_plan()), num_slots=5000)


def test_rows_may_be_spread_over_workers_in_another_order():
    """Another device may place whole rows differently: the invariants bind only the order inside a row."""
    plan = build_plan([32, 17, 32, 20], 4)
    assert plan.split.work_indptr.tolist() == [0, 1, 2, 3, 4]
    validate_plan(with_split(plan, work_info=plan.split.work_info.flip(0)))
