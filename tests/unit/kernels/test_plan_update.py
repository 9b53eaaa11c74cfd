"""An updated plan has the effect of a new one, and is refused where it would not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan, build_plan, split_rows
from kernels_integration.plan_check import validate_plan
from kernels_integration.plan_update import update_plan
from kernels_integration.reference.attention import run, run_work_items
from kernels_integration.rows import Selection

DENSE = {"max_visible": 0, "index_topk": None, "dcp_size": 1}


def selection(lens: list[int], seed: int = 0) -> Selection:
    indptr = torch.tensor([0, *lens]).cumsum(0).int()
    slots = torch.randint(64, (int(indptr[-1]),), generator=torch.Generator().manual_seed(seed))
    return Selection(kv_indptr=indptr, kv_indices=slots)


def attended(attend, plan):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(plan.rows, 2, 6, generator=generator, dtype=torch.float64)
    kv = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    o, lse = q.new_full((plan.rows, 2, 4), torch.nan), q.new_full((plan.rows, 2), torch.nan)
    attend(plan, q, StoredVectors.plain(kv), o, lse, sm_scale=0.3)
    return o, lse


def last_item_vanishes(plan: SparseMLAPlan, rejected: list[int]) -> bool:
    """By definition, item by item: a row's last item must keep a token."""
    if plan.split is None:
        return False
    items = plan.split.work_info.tolist()
    lasts = {row: kv_end - kv_start for row, _, _, _, kv_start, kv_end, _, _ in items}
    return any(lasts[row] + 1 - r < 1 for row, r in enumerate(rejected))


@pytest.mark.slow
@given(
    lens=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=8),
    num_parts=st.sampled_from([None, 1, 2, 5, 16]),
    steps=st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=8, max_size=8), max_size=5),
)
@settings(max_examples=120, deadline=None)
def test_steps_of_updates_equal_a_rebuild_in_effect(lens, num_parts, steps):
    """Every invariant, the same rows over the same KV, by work items too; a refusal only where one is due."""
    now = selection(lens)
    plan = build_plan(lens, num_parts, kv_indices=now.kv_indices)
    for step, rejections in enumerate(steps):
        rejected = rejections[: len(lens)]
        grown = [n + 1 - r for n, r in zip(lens, rejected, strict=True)]
        if min(grown) < 1:
            break
        now = selection(grown, seed=step)
        if last_item_vanishes(plan, rejected):
            with pytest.raises(PlanError, match="nothing left for the last item"):
                update_plan(plan, now, torch.tensor(rejected), **DENSE)
            break
        plan, lens = update_plan(plan, now, torch.tensor(rejected), **DENSE), grown
        validate_plan(plan, num_slots=64)
        rebuilt = build_plan(lens, num_parts, kv_indices=now.kv_indices)
        assert torch.equal(plan.kv_indptr, rebuilt.kv_indptr)
        assert plan.kv_bound == rebuilt.kv_bound
        expected_o, expected_lse = attended(run, rebuilt)
        for attend in (run,) if num_parts is None else (run, run_work_items):
            o, lse = attended(attend, plan)
            torch.testing.assert_close(o, expected_o)
            torch.testing.assert_close(lse, expected_lse)


def test_the_fixed_shapes_of_a_device_are_updated_alike():
    """Unused items stay zero, and none is counted as a row's."""
    lens, now = [700, 700, 5], selection([701, 701, 6])
    plan = build_plan(lens, 3, kv_indices=selection(lens).kv_indices)
    rejected = torch.tensor([0, 0, 0])
    fixed = split_rows(plan.kv_indptr, 3)
    assert len(fixed.work_info) > len(plan.split.work_info)
    updated = update_plan(plan, now, rejected, **DENSE)
    updated_fixed = update_plan(replace(plan, split=fixed), now, rejected, **DENSE)
    used = len(updated.split.work_info)
    assert torch.equal(updated_fixed.split.work_info[:used], updated.split.work_info)
    assert not updated_fixed.split.work_info[used:].any()


def test_a_device_is_not_asked():
    """Meta tensors have no values: whatever reads one on the host fails."""
    plan = build_plan([700, 40], 3, kv_indices=selection([700, 40]).kv_indices)

    def meta(tensor):
        return tensor.to("meta")

    arrays = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    split = replace(plan.split, **{name: meta(getattr(plan.split, name)) for name in arrays})
    plan = replace(plan, kv_indptr=meta(plan.kv_indptr), kv_indices=meta(plan.kv_indices), split=split)
    now = Selection(kv_indptr=meta(torch.zeros(3).int()), kv_indices=meta(torch.zeros(900).long()))
    updated = update_plan(plan, now, meta(torch.zeros(2).int()), **DENSE)
    assert updated.kv_bound == 900
    assert updated.split.work_info.shape == plan.split.work_info.shape
    assert updated.split.reduce_indptr is plan.split.reduce_indptr


@pytest.mark.parametrize(
    ("old", "new", "rejected", "message"),
    [
        ([5, 0], [6, 1], [0, 0], "no KV before in row 1"),
        ([64, 9], [64, 10], [0, 0], "one more, less what was rejected, in row 0 .64 tokens before, 64 now"),
        ([5, 9], [6, 9], [0, 0], "one more, less what was rejected, in row 1"),
        ([5, 9], [6, 10], [0, 1], "one more, less what was rejected, in row 1"),
        ([5, 9], [6, 11], [0, -1], "a negative number of rejected drafts in row 1"),
        ([5, 1], [6, 0], [0, 2], "nothing left for the last item of row 1"),
        ([5, 9], [6], [0], "2 rows cannot be updated to 1 rows"),
        ([5, 9], [6, 10, 1], [0, 0, 0], "2 rows cannot be updated to 3 rows"),
        ([5, 9], [6, 10], [0], r"with \(1,\) numbers"),
    ],
)
@pytest.mark.parametrize("num_parts", [None, 4])
def test_what_did_not_grow_so_is_refused(old, new, rejected, message, num_parts):
    """Clamped rows, rounds of DCP, and q > 1 that becomes q = 1 show as lengths or rows that do not fit."""
    plan = build_plan(old, num_parts, kv_indices=selection(old).kv_indices)
    with pytest.raises(PlanError, match=message):
        update_plan(plan, selection(new), torch.tensor(rejected), **DENSE)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"max_visible": 65, "index_topk": 64},
            "rows that see 65 tokens cannot be updated: beyond index_topk 64",
        ),
        ({"dcp_size": 2}, r"under DCP \(2 ranks\) cannot be updated"),
    ],
)
def test_sparse_rows_and_dcp_are_refused_by_host_integers_alone(facts, message):
    plan = build_plan([5], 2, kv_indices=selection([5]).kv_indices)
    with pytest.raises(PlanError, match=message):
        update_plan(plan, selection([6]), torch.tensor([0]), **(DENSE | facts))
    update_plan(plan, selection([6]), torch.tensor([0]), **(DENSE | {"max_visible": 64, "index_topk": 64}))
