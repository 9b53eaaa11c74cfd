"""The indexer in Triton against torch's selection, and both against scores by the formula."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors, key_format
from kernels_integration.kv_layout import KVLayout
from kernels_integration.reference.selection import select_topk
from kernels_integration.rows import RowBatch, RowGroup
from kernels_integration.triton import indexer, listing
from kernels_integration.triton.local_rows import LocalRows
from kernels_integration.triton.topk import select_best
from tests.support.guarded import Guarded

gpu = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class IndexerCase:
    """Requests with their own pages in random order; row t sees tokens visible_from[t]..visible_to[t] - 1.

    Scores of a row begin with its first visible token. shares: the rows of a request begin alike and
    are said to stand together.
    """

    def __init__(
        self,
        device: torch.device,
        bounds: list[tuple[int, int]],
        *,
        rows_per_request: int = 1,
        shares: bool = False,
        heads: int = 4,
        dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        key_dtype: str | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.page_size, self.rows_per_request = page_size, rows_per_request
        self.T, B = len(bounds), len(bounds) // rows_per_request
        longest = max(to for _, to in bounds)
        pages = max(1, -(-longest // page_size))
        self.length = pages * page_size
        table = torch.randperm(B * pages + 3, generator=generator)[: B * pages].view(B, pages)
        num_slots = (B * pages + 3) * page_size
        token = torch.arange(self.length)
        self.slots = table[:, token // page_size] * page_size + token % page_size  # [B, L]
        values = torch.randn(num_slots, dim, generator=generator)
        if key_dtype == "fp8":
            layout = KVLayout(
                kv_cache_dtype="bfloat16", indexer_kv_dtype="fp8", latent_rank=8, rope_dim=8, index_dim=dim
            )
            format_ = key_format(layout)
            self.keys_cpu = StoredVectors(format_.encode(values), format_)
        else:
            self.keys_cpu = StoredVectors.plain(values.to(dtype))
        self.keys = StoredVectors(Guarded.of(self.keys_cpu.storage, device).tensor, self.keys_cpu.format)
        self.q_cpu = torch.randn(self.T, heads, dim, generator=generator).to(dtype)
        self.weights_cpu = torch.randn(self.T, heads, generator=generator)
        self.q = Guarded.of(self.q_cpu, device).tensor
        self.weights = Guarded.of(self.weights_cpu, device).tensor
        self.visible_from_cpu = torch.tensor([start for start, _ in bounds])
        self.visible_to_cpu = torch.tensor([to for _, to in bounds])
        request = torch.arange(B).repeat_interleave(rows_per_request)
        self.rows = LocalRows(
            visible_from=Guarded.of(self.visible_from_cpu.int(), device).tensor,
            visible_to=Guarded.of(self.visible_to_cpu.int(), device).tensor,
            request=Guarded.of(request, device).tensor,
            page_table=Guarded.of(table.int(), device).tensor,
            page_size=page_size,
            max_visible=self.length,
            rows_per_request=rows_per_request if shares else 1,
        )
        self.scores = Guarded((self.T, self.length), torch.float32, device)

    def row_slots(self, row: int) -> Tensor:
        return self.slots[row // self.rows_per_request]

    def score(self) -> Tensor:
        indexer.score_tokens(self.q, self.weights, self.keys, self.rows, self.scores.tensor)
        self.scores.check()
        return self.scores.tensor.cpu()

    def expected_scores(self, row: int) -> Tensor:
        keys = self.keys_cpu.gather(self.row_slots(row), torch.float64)
        products = keys @ self.q_cpu[row].double().T * self.q_cpu.shape[-1] ** -0.5
        return products.relu() @ self.weights_cpu[row].double()

    def check_scores(self) -> None:
        scores = self.score()
        for row in range(self.T):
            start, to = int(self.visible_from_cpu[row]), int(self.visible_to_cpu[row])
            expected = self.expected_scores(row)[start:to]
            tolerance = TOLERANCE[self.q.dtype] * max(float(expected.abs().max()), 1.0) if to > start else 0
            num = max(to - start, 0)
            torch.testing.assert_close(scores[row, :num].double(), expected, rtol=0, atol=tolerance)
            assert scores[row, num:].isnan().all(), "the score of a token that is not seen"

    def select(self, topk: int, scores: Tensor | None = None, **cut: int) -> list[list[int]]:
        """Selected slots of each row by the kernel, from its own scores or those given."""
        if scores is None:
            self.score()
        else:
            self.scores.tensor.copy_(scores)
        counts = (self.visible_to_cpu - self.visible_from_cpu).clamp(0, topk)
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        kv_indices = Guarded((int(indptr[-1]) + 5,), torch.int64, self.q.device)
        select_best(
            self.scores.tensor, self.rows, indptr.to(self.q.device), kv_indices.tensor, topk=topk, **cut
        )
        kv_indices.check()
        written = kv_indices.tensor.cpu()
        assert kv_indices.is_poison(written[int(indptr[-1]) :]).all()
        return [written[indptr[row] : indptr[row + 1]].tolist() for row in range(self.T)]

    def expected_selection(self, topk: int, scores: Tensor) -> list[list[int]]:
        """By a stable sort of the scores, each row for itself."""
        selections = []
        for row in range(self.T):
            start, to = int(self.visible_from_cpu[row]), int(self.visible_to_cpu[row])
            values = scores[row, : max(to - start, 0)].nan_to_num(
                nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
            )
            best = values.sort(descending=True, stable=True).indices[:topk].sort().values + start
            selections.append(self.row_slots(row)[best].tolist())
        return selections


EDGES = [(0, 0), (0, 1), (0, 31), (0, 32), (0, 33), (1, 64), (5, 70), (0, 130)]


def test_scores(device):
    IndexerCase(device, EDGES).check_scores()


def test_scores_of_several_rows_a_request(device):
    bounds = [(0, 60), (0, 61), (0, 0), (1, 90), (1, 91), (1, 92)]
    IndexerCase(device, bounds, rows_per_request=3, heads=5, dim=40, page_size=1).check_scores()


@pytest.mark.parametrize("rows_per_request", [2, 3, 5])
def test_scores_of_rows_that_share_their_keys(device, rows_per_request):
    ends = [0, 1, 33, 140, 141, 142, 0, 0, 0, 150, 64, 65, 66, 67, 68][
        : 15 // rows_per_request * rows_per_request
    ]
    bounds = [(2 if i < rows_per_request else 0, end) for i, end in enumerate(ends)]
    IndexerCase(device, bounds, rows_per_request=rows_per_request, shares=True, page_size=8).check_scores()


def test_scores_of_fp8_keys(device):
    IndexerCase(device, EDGES, key_dtype="fp8").check_scores()


@pytest.mark.parametrize(
    "cut", [{}, {"tile": 16, "room": 64, "samples": 32}, {"tile": 64, "room": 32, "samples": 16}], ids=str
)
@pytest.mark.parametrize("topk", [1, 32, 64, 200])
def test_selection_by_given_scores(device, topk, cut):
    """Also where the sample misleads, and where the candidates have no room."""
    case = IndexerCase(device, EDGES)
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(case.T, case.length, generator=generator)
    scores[:, 1::5] = 0.25  # ties across the cut
    scores[:, 2::7] = torch.tensor([0.0, -0.0])[torch.randint(2, scores[:, 2::7].shape, generator=generator)]
    scores[:, 11], scores[:, 12], scores[:, 13] = torch.nan, torch.inf, -torch.inf
    assert case.select(topk, scores, **cut) == case.expected_selection(topk, scores)


def test_selection_where_all_scores_are_equal_or_not_a_number(device):
    case = IndexerCase(device, [(0, 100), (3, 90)])
    for value in (0.0, torch.nan, -torch.inf):
        scores = torch.full((2, case.length), value)
        expected = [case.row_slots(0)[:40].tolist(), case.row_slots(1)[3:43].tolist()]
        assert case.select(40, scores) == case.select(40, scores, tile=32, room=32) == expected


def test_selects_as_torch_does(device):
    """End to end against the reference backend. Random scores leave no near ties."""
    length, topk = 96, 32
    case = IndexerCase(
        device, [(0, length - 1), (0, length), (0, 80), (0, 81)], rows_per_request=2, page_size=8
    )
    group = RowGroup(
        row_start=0,
        num_requests=2,
        rows_per_request=2,
        kv_slots=case.slots,
        kv_positions=torch.arange(case.length),
    )
    rows = RowBatch(
        positions=case.visible_to_cpu - 1,
        visible_from=case.visible_from_cpu,
        visible_to=case.visible_to_cpu,
        write_rows=torch.empty(0, dtype=torch.int64),
        write_slots=torch.empty(0, dtype=torch.int64),
        groups=(group,),
        max_visible=length,
    )
    expected = select_topk(
        case.q_cpu.double(), case.weights_cpu, case.keys_cpu, rows, topk, DcpGroup(1, SoloCollectives())
    )
    indptr = expected.kv_indptr.tolist()
    for row, slots in enumerate(case.select(topk)):
        assert slots == expected.kv_indices[indptr[row] : indptr[row + 1]].tolist()


def test_dense_rows_list_every_visible_slot(device):
    case = IndexerCase(device, EDGES)
    counts = (case.visible_to_cpu - case.visible_from_cpu).clamp_min(0)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    kv_indices = Guarded((int(indptr[-1]),), torch.int32, device)
    listing.list_visible(case.rows, indptr.to(device), kv_indices.tensor)
    kv_indices.check()
    for row, (start, to) in enumerate(EDGES):
        written = kv_indices.tensor[indptr[row] : indptr[row + 1]].cpu()
        assert written.tolist() == case.slots[row, start:to].tolist()


T = 2048
RELEASED = [(0, 0), (0, 1), (0, 63), (0, 64), (0, 65), (0, T - 1), (0, T), (1, T + 1), (0, T + 1), (0, 32768)]


@gpu
@pytest.mark.parametrize("key_dtype", [None, "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "sharing"])
def test_released_sizes(device, dtype, key_dtype, shares):
    case = IndexerCase(
        device,
        [(0, to) for _, to in RELEASED] if shares else RELEASED,
        rows_per_request=5 if shares else 2,
        heads=64,
        dim=128,
        page_size=64,
        dtype=dtype,
        key_dtype=key_dtype,
        shares=shares,
    )
    case.check_scores()
    scores = case.scores.tensor.cpu()
    assert case.select(T) == case.expected_selection(T, scores)


@gpu
@pytest.mark.parametrize("seed", range(5))
def test_random_selections(device, seed):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, 20000, (24,), generator=generator).tolist()
    case = IndexerCase(device, [(end // 7 if end % 2 else 0, end) for end in ends], page_size=64, seed=seed)
    scores = torch.randn(case.T, case.length, generator=generator)
    if seed % 2:
        scores = (scores * 8).round() / 8  # many ties
    for topk, cut in ((1, {}), (64, {}), (64, {"tile": 8192}), (2048, {}), (2048, {"samples": 64})):
        assert case.select(topk, scores, **cut) == case.expected_selection(topk, scores)
