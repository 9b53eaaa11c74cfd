"""The plan that one kernel builds equals the host planner's in every array."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.plan import SparseMLAPlan, plan_from_indptr
from kernels_integration.triton import plan_build

ARRAYS = ("kv_indptr", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def host_plan(kv_lens: list[int], num_parts: int) -> SparseMLAPlan:
    return plan_from_indptr(torch.tensor([0, *kv_lens]).cumsum(0).int(), num_parts)


def assert_equal(plan: SparseMLAPlan, kv_lens: list[int], num_parts: int) -> None:
    expected = host_plan(kv_lens, num_parts)
    for name in ARRAYS:
        owners = (plan, expected) if name == "kv_indptr" else (plan.split, expected.split)
        actual, wanted = (getattr(owner, name).cpu() for owner in owners)
        assert torch.equal(actual[: len(wanted)], wanted), (name, kv_lens, num_parts)
        if name == "work_info":
            assert not actual[len(wanted) :].any()
    assert plan.rows == len(kv_lens)


def random_lens(rng: random.Random) -> list[int]:
    rows = rng.choice([1, 2, 3, 7, 32, 33, rng.randint(1, 130)])
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.choice([0, 1, 15, 16, 17, 63, 64, 65, 2047, 2048, 2049]) for _ in range(rows)]
    if kind == 1:
        return [rng.randint(0, 6000) for _ in range(rows)]
    if kind == 2:
        return [rng.choice([0, 2048]) for _ in range(rows)]
    return [rng.choice([0, 3, 200_000]) for _ in range(rows)]


def check_random_plans(device: torch.device, seed: int, cases: int) -> None:
    rng = random.Random(seed)
    for _ in range(cases):
        kv_lens, num_parts = random_lens(rng), rng.choice([1, 2, 3, 8, 64, 132, 256])
        if device.type == "cpu":
            num_parts = min(num_parts, 8)
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        assert_equal(plan_build.build_plan(lens, num_parts), kv_lens, num_parts)
        indptr = torch.tensor([0, *kv_lens], device=device).cumsum(0).int()
        assert_equal(plan_build.build_plan_from_indptr(indptr, num_parts), kv_lens, num_parts)


def test_equals_the_host_planner(device):
    check_random_plans(device, seed=0, cases=60 if device.type == "cuda" else 8)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1, 5))
def test_equals_the_host_planner_on_thousands_of_cases(device, seed):
    check_random_plans(device, seed, cases=500)


@pytest.mark.parametrize("kv_lens", [[], [0], [0] * 9, [1], [5, 0, 40], [1_000_000]])
def test_edges(device, kv_lens):
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    for num_parts in (1, 4):
        assert_equal(plan_build.build_plan(lens, num_parts), kv_lens, num_parts)


@pytest.mark.gpu
def test_many_rows(device):
    for rows in (512, 1024, 1025, 4096, 4097):
        kv_lens = [(37 * row) % 2100 for row in range(rows)]
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        assert_equal(plan_build.build_plan(lens, 132), kv_lens, 132)
