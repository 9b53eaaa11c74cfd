"""Spans of a profiled backend: every operation has one, with the work that its sizes say; results stay."""

import torch

from kernels_integration.backend import Routing
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import plan_from_indptr
from kernels_integration.profiled import PREFIX, profiled
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.spans import Spans
from kernels_integration.weight import Weight


def test_work_is_counted_by_hand() -> None:
    spans = Spans(is_on=True)
    plain = TorchBackend()
    backend = profiled(plain, spans)
    x = torch.randn(3, 8)
    weight = torch.randn(6, 8)
    assert torch.equal(backend.linear(Weight(weight))(x), plain.linear(Weight(weight))(x))
    (span,) = spans.take()
    assert (span.name, span.num_flops) == (PREFIX + "linear 8 -> 6", 2 * 3 * 8 * 6)
    assert span.num_bytes == 4 * (6 * 8 + 3 * 8 + 3 * 6)

    experts = backend.experts(
        Weight(torch.randn(4, 10, 8)), Weight(torch.randn(4, 8, 5)), first_expert=2, num_experts=8
    )
    chosen = torch.tensor([[2, 7], [2, 3], [0, 1]])  # two experts held here, three times hit
    experts(x, chosen, torch.ones(3, 2), torch.zeros(3, 8))
    (span,) = spans.take()
    assert span.num_flops == 3 * 2 * (10 * 8 + 8 * 5)
    assert span.num_bytes == 4 * (2 * (10 * 8 + 8 * 5) + 3 * 3 * 8 + 3 * 2) + 8 * 3 * 2

    kv = StoredVectors.plain(torch.randn(20, 12))
    plan = plan_from_indptr(torch.tensor([0, 4, 9], dtype=torch.int32), None, kv_indices=torch.arange(9))
    q, o, lse = torch.randn(2, 3, 12), torch.empty(2, 3, 10), torch.empty(2, 3)
    backend.attend(plan, q, kv, o, lse, sm_scale=0.3)
    (span,) = spans.take()
    assert (span.name, span.num_flops) == (PREFIX + "attend", 2 * 9 * 3 * (12 + 10))
    assert span.num_bytes == 4 * (9 * 12 + 2 * 3 * 12 + 2 * 3 * 10 + 2 * 3)

    backend.rms_norm(x, torch.ones(8), 1e-6)
    backend.route(
        x,
        torch.randn(4, 8),
        torch.zeros(4),
        Routing(topk=2, num_groups=1, topk_group=1, normalise=True, scaling_factor=1.0),
    )
    assert [span.name for span in spans.take()] == [PREFIX + "rms_norm", PREFIX + "route"]
