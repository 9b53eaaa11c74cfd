"""Attention by the plan in Triton against torch's, in float64 on the same values."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors, latent_format
from kernels_integration.kv_layout import KVLayout
from kernels_integration.plan import build_plan
from kernels_integration.reference import attention
from kernels_integration.triton import mla_attention
from tests.support.guarded import Guarded, largest_row_error

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL = [0, 1, 63, 64, 65, 0, 130]
TOPK = 2048
gpu = pytest.mark.gpu


class AttentionCase:
    """Random rows over random slots; unselected slots hold NaN, and NaN lies around every tensor."""

    def __init__(
        self,
        device: torch.device,
        kv_lens: list[int],
        num_parts: int,
        *,
        heads: int,
        latent: int = 512,
        rope: int = 64,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str | None = None,
        spare_rows: int = 2,
        duplicates: bool = False,
        index_dtype: torch.dtype = torch.int64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_lens, self.rows = kv_lens, len(kv_lens)
        self.device, self.scale = device, (latent + rope) ** -0.5
        num_slots = max(max(kv_lens, default=0), 1) * 2
        slots = [
            torch.randint(num_slots, (n,), generator=generator)
            if duplicates
            else torch.randperm(num_slots, generator=generator)[:n]
            for n in kv_lens
        ]
        self.kv_indices = torch.cat([*slots, torch.zeros(0, dtype=torch.int64)]).to(index_dtype)
        lens = torch.tensor(kv_lens, dtype=torch.int32).to(device)
        self.plan = build_plan(lens, num_parts, kv_indices=Guarded.of(self.kv_indices, device).tensor)
        values = torch.randn(num_slots, latent + rope, generator=generator)
        if kv_dtype == "fp8_ds_mla":
            layout = KVLayout(
                kv_cache_dtype=kv_dtype,
                indexer_kv_dtype="fp8",
                latent_rank=latent,
                rope_dim=rope,
                index_dim=0,
            )
            format_ = latent_format(layout)
            stored = format_.encode(values)
            self.kv_cpu = StoredVectors(stored, format_)
        else:
            unused = torch.ones(num_slots, dtype=torch.bool)
            unused[self.kv_indices.long()] = False
            stored = values.masked_fill_(unused.unsqueeze(1), torch.nan)
            stored = stored.to(dtype if kv_dtype is None else getattr(torch, kv_dtype))
            self.kv_cpu = StoredVectors.plain(stored)
        self.kv = StoredVectors(Guarded.of(stored, device).tensor, self.kv_cpu.format)
        all_rows = self.rows + spare_rows
        q = torch.randn(all_rows, heads, latent + rope, generator=generator).to(dtype)
        self.q_cpu = q
        self.q = Guarded.of(q, device)
        self.o = Guarded((all_rows, heads, latent), dtype, device)
        self.lse = Guarded((all_rows, heads), torch.float32, device)

    def run(self, **options) -> tuple[Tensor, Tensor]:
        mla_attention.run(
            self.plan, self.q.tensor, self.kv, self.o.tensor, self.lse.tensor, sm_scale=self.scale, **options
        )
        for guarded in (self.q, self.o, self.lse):
            guarded.check()
        assert self.o.tensor[self.rows :].isnan().all(), "a row that is not planned was written"
        assert self.lse.tensor[self.rows :].isnan().all()
        return self.o.tensor[: self.rows].cpu(), self.lse.tensor[: self.rows].cpu()

    def expected(self) -> tuple[Tensor, Tensor]:
        """By torch in float64, on the same device for its speed."""
        lens = torch.tensor(self.kv_lens, dtype=torch.int32, device=self.device)
        plan = build_plan(lens, None, kv_indices=self.kv_indices.to(self.device))
        kv = StoredVectors(self.kv_cpu.storage.to(self.device), self.kv_cpu.format)
        o = torch.empty(self.rows, *self.o.tensor.shape[1:], dtype=torch.float64, device=self.device)
        lse = torch.empty(self.rows, self.lse.tensor.shape[1], dtype=torch.float64, device=self.device)
        q = self.q_cpu[: self.rows].to(self.device).double()
        attention.run(plan, q, kv, o, lse, sm_scale=self.scale)
        return o.cpu(), lse.cpu()

    def check(self, **options) -> None:
        o, lse = self.run(**options)
        expected_o, expected_lse = self.expected()
        tolerance = TOLERANCE[self.q.tensor.dtype]
        assert largest_row_error(o, expected_o) < tolerance
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize("num_parts", [1, 5, 40])
@pytest.mark.parametrize(("latent", "rope", "heads"), [(128, 32, 8), (96, 20, 3)])
def test_edge_lengths_in_few_and_many_parts(device, num_parts, latent, rope, heads):
    AttentionCase(device, SMALL, num_parts, heads=heads, latent=latent, rope=rope).check()


def test_rows_without_kv(device):
    case = AttentionCase(device, [0, 0, 0], 8, heads=4, latent=128, rope=32)
    o, lse = case.run()
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_no_rows(device):
    case = AttentionCase(device, [], 8, heads=4, latent=128, rope=32)
    case.run()


def test_the_same_slot_more_than_once(device):
    AttentionCase(device, [40, 90, 7], 6, heads=4, latent=128, rope=32, duplicates=True).check()


def test_a_slot_below_zero_is_absent(device):
    case = AttentionCase(device, [70, 33, 5], 4, heads=4, latent=128, rope=32)
    expected_o, expected_lse = case.expected()
    # The same rows with holes between their slots.
    lens = [2 * n for n in (70, 33, 5)]
    holes = torch.full((sum(lens),), -1)
    holes[1::2] = case.kv_indices
    case.plan = build_plan(torch.tensor(lens).to(device), 4, kv_indices=holes.to(device))
    o, lse = case.run()
    assert largest_row_error(o, expected_o) < 2e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)


def test_fp8_latents(device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = AttentionCase(device, SMALL, 5, heads=8, latent=128, rope=32, dtype=dtype, kv_dtype="fp8_ds_mla")
    case.check()


def test_float16(device):
    AttentionCase(device, [17, 0, 40], 4, heads=4, latent=128, rope=32, dtype=torch.float16).check()


def test_refuses_what_it_cannot_read(device):
    case = AttentionCase(device, [3], 2, heads=4, latent=128, rope=32)
    with pytest.raises(PlanError, match="float64"):
        mla_attention.run(
            case.plan,
            case.q.tensor.double(),
            case.kv,
            case.o.tensor.double(),
            case.lse.tensor.double(),
            sm_scale=1.0,
        )
    with pytest.raises(PlanError, match="rows"):
        mla_attention.run(
            case.plan, case.q.tensor[:0], case.kv, case.o.tensor[:0], case.lse.tensor[:0], sm_scale=1.0
        )


LENGTHS = {
    "edges": [0, 1, 63, 64, 65, TOPK - 1, TOPK, TOPK + 1],
    "one": [TOPK],
    "ragged": [5000, 3, 0, 777, 2048, 12, 64, 1, 31, 4096],
    "many": [TOPK, 1000, 0] * 50,
    "prefill": list(range(700)),
}


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_released_sizes(device, lengths, heads, dtype):
    index_dtype = torch.int32 if lengths == "ragged" else torch.int64
    AttentionCase(device, LENGTHS[lengths], 132, heads=heads, dtype=dtype, index_dtype=index_dtype).check()


@gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("lengths", ["edges", "ragged", "many"])
def test_released_sizes_in_fp8(device, lengths, heads):
    AttentionCase(
        device, LENGTHS[lengths], 132, heads=heads, dtype=torch.bfloat16, kv_dtype="fp8_ds_mla"
    ).check()


@gpu
def test_slots_past_four_gibibytes(device):
    dtype = torch.bfloat16
    num_slots = 2**31 // 576 + 5000
    storage = torch.empty(num_slots, 576, dtype=dtype, device=device)
    near = torch.randint(0, 1000, (50,), device=device)
    far = num_slots - 1 - torch.randperm(3000, device=device)[:50]
    slots = torch.cat((near, far))
    storage[slots] = torch.randn(100, 576, device=device, dtype=dtype)
    q = torch.randn(1, 16, 576, device=device, dtype=dtype)
    outputs = []
    for kv, indices in ((storage, slots), (storage[slots].contiguous(), torch.arange(100, device=device))):
        o = torch.full((1, 16, 512), torch.nan, device=device, dtype=dtype)
        lse = torch.full((1, 16), torch.nan, device=device)
        plan = build_plan(torch.tensor([100], device=device), 4, kv_indices=indices)
        mla_attention.run(plan, q, StoredVectors.plain(kv), o, lse, sm_scale=0.04)
        outputs.append((o, lse))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


@gpu
def test_a_graph_replays_with_other_lengths(device):
    """Captured once, replayed on new contents of the same tensors."""
    from kernels_integration.triton.plan_build import build_plan as device_plan

    rows, heads = 6, 16
    lens = torch.zeros(rows, dtype=torch.int32, device=device)
    indices = torch.zeros(rows * 600, dtype=torch.int64, device=device)
    storage = torch.randn(4000, 576, device=device).bfloat16()
    q = torch.randn(rows, heads, 576, device=device).bfloat16()
    o = torch.empty(rows, heads, 512, device=device)
    lse = torch.empty(rows, heads, device=device)

    def step() -> None:
        plan = device_plan(lens, 64, kv_indices=indices)
        mla_attention.run(plan, q, StoredVectors.plain(storage), o, lse, sm_scale=0.04)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lens in ([0, 1, 64, 65, 600, 17], [600] * 6, [0] * 6, [5, 0, 0, 590, 1, 2]):
        lens.copy_(torch.tensor(new_lens))
        indices.copy_(torch.randint(4000, indices.shape))
        o.fill_(torch.nan)
        graph.replay()
        cpu = build_plan(new_lens, 3, kv_indices=indices.cpu())
        expected = torch.empty(rows, heads, 512, dtype=torch.float64)
        expected_lse = torch.empty(rows, heads, dtype=torch.float64)
        attention.run(
            cpu, q.cpu().double(), StoredVectors.plain(storage.cpu()), expected, expected_lse, sm_scale=0.04
        )
        assert largest_row_error(o, expected) < 2e-2
        torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=0, atol=0.05)
