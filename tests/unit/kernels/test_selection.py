"""select_visible and select_topk against a brute-force reference over global positions."""

import itertools
import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_integration.collectives import SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.reference import selection as selection_module
from kernels_integration.reference.selection import select_topk, select_visible
from kernels_integration.rows import RowBatch, RowGroup, Selection

BLOCK_SIZE = 4
HEADS = 2
DIM = 4


@dataclass(frozen=True)
class Request:
    """Rows at global positions context .. context + num_rows - 1; some may be without KV."""

    context: int
    visible_from: int
    empty_rows: tuple[bool, ...]

    @property
    def length(self) -> int:
        return self.context + len(self.empty_rows)


@dataclass(frozen=True)
class Case:
    """Row groups of requests that bring equally many rows."""

    groups: tuple[tuple[Request, ...], ...]
    seed: int
    dtype: torch.dtype = torch.float32

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.groups for request in group]

    def visible(self) -> list[list[int]]:
        """Per row the global positions that it sees."""
        return [
            [] if empty else list(range(request.visible_from, request.context + i + 1))
            for request in self.requests
            for i, empty in enumerate(request.empty_rows)
        ]

    def owning_requests(self) -> list[int]:
        return [b for b, request in enumerate(self.requests) for _ in request.empty_rows]


def owner(g: int, size: int, interleave: int) -> int:
    return (g // interleave) % size


class World:
    """The case laid out on `size` ranks: slots are drawn at random, other slots hold decoys."""

    def __init__(self, case: Case, size: int, interleave: int, *, levels: int = 1) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-levels, levels + 1, shape, generator=generator).to(case.dtype)

        self.case, self.size, self.interleave = case, size, interleave
        num_rows = len(case.visible())
        self.q = integers(num_rows, HEADS, DIM)
        self.weights = integers(num_rows, HEADS)
        self.keys = [integers(request.length, DIM) for request in case.requests]
        most = max(-(-request.length // (BLOCK_SIZE * size)) for request in case.requests)
        num_blocks = most * len(case.requests) + 1
        tables = torch.randperm(num_blocks, generator=generator)[: most * len(case.requests)]
        self.tables = tables.view(len(case.requests), most).tolist()
        self.caches = [integers(num_blocks * BLOCK_SIZE, DIM) for _ in range(size)]
        for b, request in enumerate(case.requests):
            for g in range(request.length):
                self.caches[owner(g, size, interleave)][self.slot(b, g)] = self.keys[b][g]

    def slot(self, b: int, g: int) -> int:
        local = g // self.interleave // self.size * self.interleave + g % self.interleave
        return self.tables[b][g // (BLOCK_SIZE * self.size)] * BLOCK_SIZE + local % BLOCK_SIZE

    def rows(self, rank: int) -> RowBatch:
        groups, row_start, b = [], 0, 0
        visible = self.case.visible()
        for group in self.case.groups:
            longest = max(request.length for request in group)
            owned = [g for g in range(longest) if owner(g, self.size, self.interleave) == rank]
            slots = [
                [self.slot(b + i, g) if g < request.length else 0 for g in owned]
                for i, request in enumerate(group)
            ]
            rows_per_request = len(group[0].empty_rows)
            groups.append(
                RowGroup(
                    row_start=row_start,
                    num_requests=len(group),
                    rows_per_request=rows_per_request,
                    kv_slots=torch.tensor(slots, dtype=torch.int64).view(len(group), len(owned)),
                    kv_positions=torch.tensor(owned, dtype=torch.int64),
                )
            )
            row_start, b = row_start + len(group) * rows_per_request, b + len(group)
        none = torch.empty(0, dtype=torch.int64)
        requests = self.case.requests
        return RowBatch(
            positions=torch.tensor([r.context + i for r in requests for i in range(len(r.empty_rows))]),
            visible_from=torch.tensor([r.visible_from for r in requests for _ in r.empty_rows]),
            visible_to=torch.tensor([v[-1] + 1 if v else 0 for v in visible]),
            write_rows=none,
            write_slots=none,
            groups=tuple(groups),
            max_visible=max(len(v) for v in visible),
        )

    def expected(self, chosen: list[list[int]], rank: int) -> list[list[int]]:
        """The rank's slots of the chosen positions."""
        return [
            [self.slot(b, g) for g in positions if owner(g, self.size, self.interleave) == rank]
            for b, positions in zip(self.case.owning_requests(), chosen, strict=True)
        ]

    def topk(self, k: int) -> list[list[int]]:
        """Brute force over global positions, in Python numbers."""
        chosen = []
        owning = self.case.owning_requests()
        for t, positions in enumerate(self.case.visible()):
            keys = self.keys[owning[t]]

            def score(g: int, t: int = t, keys: Tensor = keys) -> float:
                return sum(
                    w * max(0.0, sum(a * b for a, b in zip(q, keys[g].tolist(), strict=True)) * DIM**-0.5)
                    for w, q in zip(self.weights[t].tolist(), self.q[t].tolist(), strict=True)
                )

            chosen.append(sorted(sorted(positions, key=lambda g: (-score(g), g))[:k]))
        return chosen

    def stored(self, rank: int) -> StoredVectors:
        return StoredVectors.plain(self.caches[rank])

    def select(self, k: int) -> list[Selection]:
        """Every rank's selection; ranks are threads."""
        return self.on_ranks(
            lambda dcp: select_topk(self.q, self.weights, self.stored(dcp.rank), self.rows(dcp.rank), k, dcp)
        )

    def on_ranks(self, work) -> list[Selection]:
        if self.size == 1:
            return [work(DcpGroup(self.interleave, SoloCollectives()))]
        members = InProcessCollectives.create(self.size, timeout_s=20)
        results: list = [None] * self.size

        def run(member: InProcessCollectives) -> None:
            try:
                results[member.rank] = work(DcpGroup(self.interleave, member))
            except BaseException as error:
                results[member.rank] = error
                member.close()

        threads = [threading.Thread(target=run, args=(member,)) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise ExceptionGroup("ranks failed", errors)
        return results


def as_lists(selection: Selection) -> list[list[int]]:
    assert selection.kv_indptr.dtype == torch.int32
    bounds = selection.kv_indptr.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == selection.kv_indices.shape[0]
    return [selection.kv_indices[a:b].tolist() for a, b in itertools.pairwise(bounds)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(1, 4))
        group = []
        for _ in range(draw(st.integers(1, 3))):
            context = draw(st.integers(0, 24))
            empty = tuple(draw(st.booleans()) and draw(st.booleans()) for _ in range(num_rows))
            group.append(Request(context, draw(st.integers(0, context)), empty))
        groups.append(tuple(group))
    return Case(
        tuple(groups), draw(st.integers(0, 2**31)), draw(st.sampled_from([torch.float32, torch.float64]))
    )


layouts = st.sampled_from([(size, s) for size in (1, 2, 4) for s in (1, 2, BLOCK_SIZE)])


@settings(max_examples=120, deadline=None)
@given(cases(), layouts)
def test_visible_is_every_owned_visible_token(case: Case, layout: tuple[int, int]) -> None:
    world = World(case, *layout)
    for rank in range(world.size):
        assert as_lists(select_visible(world.rows(rank))) == world.expected(case.visible(), rank)


@settings(max_examples=200, deadline=None)
@given(cases(), layouts, st.integers(1, 30), st.integers(0, 2))
def test_topk_equals_brute_force_on_every_rank(
    case: Case, layout: tuple[int, int], topk: int, levels: int
) -> None:
    """Small integers: scores are exact and tie often; levels 0 makes all scores equal."""
    world = World(case, *layout, levels=levels)
    chosen = world.topk(topk)
    for rank, selection in enumerate(world.select(topk)):
        assert as_lists(selection) == world.expected(chosen, rank)


@settings(max_examples=60, deadline=None)
@given(cases(), layouts, st.integers(1, 6), st.integers(1, 700))
def test_any_tiling_gives_the_same(case: Case, layout: tuple[int, int], topk: int, tile_bytes: int) -> None:
    world = World(case, *layout)
    expected = [as_lists(selection) for selection in world.select(topk)]
    original = selection_module._CPU_TILE_BYTES
    selection_module._CPU_TILE_BYTES = tile_bytes
    try:
        assert [as_lists(selection) for selection in world.select(topk)] == expected
    finally:
        selection_module._CPU_TILE_BYTES = original


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("visible", [1, 7, 8, 9])
def test_lengths_around_topk(visible: int, size: int) -> None:
    case = Case(((Request(visible - 1, 0, (False,)), Request(15, 16 - visible, (False,))),), seed=visible)
    world = World(case, size, 1)
    chosen = world.topk(8)
    assert [len(c) for c in chosen] == [min(visible, 8)] * 2
    for rank, selection in enumerate(world.select(8)):
        assert as_lists(selection) == world.expected(chosen, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_zeros_of_both_signs_tie(size: int) -> None:
    """A weight of -1 times relu's 0 is -0.0: no worse than 0.0, so the lowest positions win."""
    world = World(Case(((Request(19, 0, (False,)),),), seed=3), size, 1)
    world.q.fill_(1.0)
    world.weights[:] = torch.tensor([-1.0, 0.0])
    for cache in world.caches:
        cache.fill_(-1.0)
    for rank, selection in enumerate(world.select(5)):
        assert as_lists(selection) == world.expected([[0, 1, 2, 3, 4]], rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_and_infinite_scores_stay_in_range(size: int, dtype: torch.dtype) -> None:
    world = World(Case(((Request(19, 2, (False, False)),),), seed=3, dtype=dtype), size, 1)
    world.q.fill_(1.0)
    world.weights[:] = torch.tensor([1.0, 0.0])
    values = {3: torch.nan, 5: torch.inf, 9: torch.nan, 11: 2.0, 12: 1.0}
    for g in range(21):
        key = torch.full((DIM,), values.get(g, torch.nan), dtype=dtype)
        world.caches[owner(g, size, 1)][world.slot(0, g)] = key
    world.weights[:, 1] = 1.0
    # 5, 11 and 12 are numbers; then NaN, lowest position first.
    for rank, selection in enumerate(world.select(5)):
        assert as_lists(selection) == world.expected([[2, 3, 5, 11, 12]] * 2, rank)


def test_all_nan_takes_the_lowest_positions() -> None:
    world = World(Case(((Request(19, 0, (False,)),),), seed=3), 2, 2)
    world.q.fill_(torch.nan)
    for rank, selection in enumerate(world.select(6)):
        assert as_lists(selection) == world.expected([[0, 1, 2, 3, 4, 5]], rank)


def test_bfloat16_keys_are_scored_in_float32() -> None:
    """Scores 256 + 1 and 256 differ in float32 and are equal in bfloat16."""
    world = World(Case(((Request(9, 0, (False,)),),), seed=0), 1, 1)
    world.q.zero_()
    world.q[0, 0] = torch.tensor([2.0, 2.0, 0.0, 0.0])
    world.weights[:] = torch.tensor([1.0, 0.0])
    world.caches[0].zero_()
    world.caches[0][world.slot(0, 4)] = torch.tensor([256.0, 0.0, 0.0, 0.0])
    world.caches[0][world.slot(0, 7)] = torch.tensor([256.0, 1.0, 0.0, 0.0])
    world.caches = [cache.bfloat16() for cache in world.caches]
    world.q, world.weights = world.q.bfloat16(), world.weights.bfloat16()
    [selection] = world.select(1)
    assert as_lists(selection) == [[world.slot(0, 7)]]


def test_scores_of_the_seam_match_the_formula() -> None:
    """Real numbers, float64: the order is the formula's, computed by einsum in another way."""
    generator = torch.Generator().manual_seed(0)
    case = Case(((Request(400, 0, (False,) * 8),), (Request(90, 0, (False,)),) * 3), 1, torch.float64)
    world = World(case, 2, 2)
    world.q = torch.randn(world.q.shape, generator=generator, dtype=torch.float64)
    world.weights = torch.randn(world.weights.shape, generator=generator, dtype=torch.float64)
    for b, keys in enumerate(world.keys):
        keys.copy_(torch.randn(keys.shape, generator=generator, dtype=torch.float64))
        for g in range(keys.shape[0]):
            world.caches[owner(g, 2, 2)][world.slot(b, g)] = keys[g]
    chosen = []
    for t, (b, positions) in enumerate(zip(case.owning_requests(), case.visible(), strict=True)):
        dots = torch.einsum("hd,sd->hs", world.q[t], world.keys[b][: len(positions)]) * DIM**-0.5
        scores = (world.weights[t, :, None] * dots.clamp(min=0)).sum(0)
        chosen.append(sorted(sorted(positions, key=lambda g: (-scores[g].item(), g))[:16]))
    for rank, selection in enumerate(world.select(16)):
        assert as_lists(selection) == world.expected(chosen, rank)


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    rows = RowBatch(
        positions=empty,
        visible_from=empty,
        visible_to=empty,
        write_rows=empty,
        write_slots=empty,
        groups=(),
        max_visible=0,
    )
    dcp = DcpGroup(1, SoloCollectives())
    selection = select_topk(
        torch.empty(0, 2, 4), torch.empty(0, 2), StoredVectors.plain(torch.empty(8, 4)), rows, 4, dcp
    )
    assert as_lists(selection) == []
