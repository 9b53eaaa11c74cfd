"""Routing and grouped experts in Triton against the formula in float64, row by row."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.triton import experts as grouped
from kernels_integration.triton.router import route
from tests.support.guarded import Guarded, largest_row_error

gpu = pytest.mark.gpu


def routed(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept_groups: int, normalise: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """The report's rule with full sorts."""
    p = logits.double().sigmoid()
    c = p + bias.double()
    grouped_c = c.view(len(c), groups, -1)
    scores = grouped_c.sort(descending=True).values[..., :2].sum(-1)
    kept = scores.sort(descending=True, stable=True).indices[:, :kept_groups]
    allowed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, kept, True)
    c = grouped_c.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    experts = c.sort(descending=True, stable=True).indices[:, :k]
    weights = p.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * factor


@pytest.mark.parametrize(
    ("num_experts", "k", "groups", "kept"), [(8, 2, 4, 2), (64, 6, 1, 1), (256, 8, 8, 4), (12, 3, 3, 1)]
)
@pytest.mark.parametrize("normalise", [True, False])
def test_route(device, num_experts, k, groups, kept, normalise):
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(9, num_experts, generator=generator)
    bias, other = torch.randn(num_experts, generator=generator) * 0.1, torch.ones(9, num_experts)
    experts = Guarded((9, k), torch.int32, device)
    weights = Guarded((9, k), torch.float32, device)
    route(
        Guarded.of(torch.stack((logits - other, other)), device).tensor,  # as two parts of a sum
        Guarded.of(bias, device).tensor,
        experts.tensor,
        weights.tensor,
        num_groups=groups,
        topk_group=kept,
        normalise=normalise,
        scaling_factor=2.5,
    )
    experts.check()
    weights.check()
    expected_experts, expected_weights = routed(logits, bias, k, groups, kept, normalise, 2.5)
    assert torch.equal(experts.tensor.cpu().long(), expected_experts)
    torch.testing.assert_close(weights.tensor.cpu().double(), expected_weights, rtol=1e-5, atol=1e-6)


def test_equal_experts_go_to_the_lower(device):
    logits, bias = torch.zeros(2, 8), torch.zeros(8)
    experts = torch.empty(2, 2, dtype=torch.int32, device=device)
    weights = torch.empty(2, 2, device=device)
    route(
        logits.unsqueeze(0).to(device),
        bias.to(device),
        experts,
        weights,
        num_groups=4,
        topk_group=2,
        normalise=True,
        scaling_factor=1.0,
    )
    assert experts.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("num_experts", [1, 5, 64])
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_every_pair_is_in_one_tile_of_its_expert(device, rows, num_experts):
    generator = torch.Generator().manual_seed(rows)
    experts = torch.randint(-1, num_experts, (rows, 3), generator=generator).int()
    tiles = grouped.group_pairs(experts.to(device), num_experts)
    pairs, tile_experts = tiles.pairs.cpu().view(-1, tiles.rows), tiles.experts.cpu()
    seen = []
    for tile, expert in zip(pairs.tolist(), tile_experts.tolist(), strict=True):
        if expert >= 0:
            real = [pair for pair in tile if pair >= 0]
            assert real
            assert all(experts.flatten()[pair] == expert for pair in real)
            seen += real
    assert sorted(seen) == (experts.flatten() >= 0).nonzero().flatten().tolist()


def experts_case(
    device: torch.device, rows: int, num_experts: int, k: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    gate_up, down = random(num_experts, 2 * width, hidden), random(num_experts, hidden, width)
    experts = torch.stack([torch.randperm(num_experts + 1, generator=generator)[:k] - 1 for _ in range(rows)])
    weights = torch.rand(rows, k, generator=generator)
    start = torch.randn(rows, hidden, generator=generator).to(dtype)
    out = Guarded.of(start, device)
    tiles = grouped.group_pairs(experts.int().to(device), num_experts)
    grouped.run_experts(
        Guarded.of(x, device).tensor,
        gate_up.to(device),
        down.to(device),
        tiles,
        Guarded.of(weights, device).tensor,
        out.tensor,
    )
    out.check()
    # Where it fits, on the device: the reference is float64 either way.
    x, gate_up, down, expected = (t.to(device).double() for t in (x, gate_up, down, start))
    for row in range(rows):
        for expert, weight in zip(experts[row].tolist(), weights[row].tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[row]).chunk(2)
                expected[row] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert largest_row_error(out.tensor, expected) < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize(("rows", "num_experts"), [(1, 4), (5, 4), (40, 2)])
def test_experts(device, rows, num_experts):
    experts_case(device, rows, num_experts, 2, hidden=80, width=40, dtype=torch.float32)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 64, 700])
def test_experts_of_released_sizes(device, rows, dtype):
    experts_case(device, rows, 16, 6, hidden=2048, width=1408, dtype=dtype)


def test_a_row_does_not_depend_on_the_others(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 64, generator=generator, dtype=torch.float32).to(device)
    gate_up = torch.randn(4, 48, 64, generator=generator).to(device)
    down = torch.randn(4, 64, 24, generator=generator).to(device)
    experts = torch.randint(0, 4, (30, 2), generator=generator).int().to(device)
    weights = torch.rand(30, 2, generator=generator).to(device)

    def outputs(rows: slice) -> Tensor:
        out = torch.zeros_like(x[rows])
        tiles = grouped.group_pairs(experts[rows].contiguous(), 4)
        grouped.run_experts(x[rows], gate_up, down, tiles, weights[rows].contiguous(), out)
        return out

    assert torch.equal(outputs(slice(0, 30))[7:8], outputs(slice(7, 8)))
