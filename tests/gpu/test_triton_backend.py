"""The bundled model on the Triton backend against the torch backend in float64 on the CPU."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.backend import Backend
from kernels_integration.kv_layout import FP8_DS_MLA
from kernels_integration.triton.backend import TritonBackend
from tests.support.groups import TINY_DSA, text_prompts
from tests.support.guarded import largest_row_error
from tests.support.model_ranks import Rank
from tests.support.model_rows import Chunk

pytestmark = pytest.mark.gpu
PROMPTS = text_prompts([90, 12, 75])
"""Shorter and longer than the 64 tokens that the indexer selects."""


def triton_backend(dtype: torch.dtype, device: torch.device) -> Backend:
    return TritonBackend(dtype, device, num_parts=0 if device.type == "cuda" else 5)


def passes(rank: Rank) -> list[Tensor]:
    """h of a prefill in two chunks and of a mixed verify, and z of an MTP pass: float64, on the CPU."""
    results = []
    ends = [len(prompt) - 3 for prompt in PROMPTS]
    for cuts in ([(0, end // 2) for end in ends], [(end // 2, end) for end in ends]):
        chunks = [Chunk(request=i, start=a, count=b - a) for i, (a, b) in enumerate(cuts)]
        ids = [t for prompt, (a, b) in zip(PROMPTS, cuts, strict=True) for t in prompt[a:b]]
        results.append(rank.forward(chunks, ids))
    chunks = [
        Chunk(request=i, start=end, count=count)
        for (i, end), count in zip(enumerate(ends), (3, 1, 2), strict=True)
    ]
    ids = [t for chunk in chunks for t in PROMPTS[chunk.request][chunk.start : chunk.start + chunk.count]]
    results.append(rank.forward(chunks, ids))
    chunk = Chunk(request=0, start=1, count=80)
    results.append(rank.mtp_forward([chunk], PROMPTS[0][1:81], torch.cat(results[:2])[:80].contiguous()))
    return [result.double().cpu() for result in results]


def rank_of(device: torch.device | None, dtype: torch.dtype, **options) -> Rank:
    return Rank(TINY_DSA, dtype, num_requests=3, num_mtp_layers=1, device=device, **options)


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    return passes(rank_of(None, torch.float64))


def test_equals_the_torch_backend(device, exact):
    actual = passes(rank_of(device, torch.float32, backend=triton_backend))
    for one, expected in zip(actual, exact, strict=True):
        assert largest_row_error(one, expected) < 1e-4


def test_bfloat16_and_fp8_stay_near(device, exact):
    """Of low precision only closeness can be asked: another token may be selected at a near tie."""
    for options in ({}, {"kv_cache_dtype": FP8_DS_MLA}):
        actual = passes(rank_of(device, torch.bfloat16, backend=triton_backend, **options))
        for one, expected in zip(actual, exact, strict=True):
            error = (one - expected).norm() / expected.norm()
            assert error < 0.1
