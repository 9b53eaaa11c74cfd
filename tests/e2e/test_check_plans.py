"""--check-plans on whole groups: nothing to report on sound ones, and a report that finds the row."""

import functools
import re

import pytest
import torch

from actors.inline_group import InlineGroup
from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from actors.shard.build import build_shard
from cluster.config import EngineArgs
from cluster.config.resolve import resolve
from kernels_integration.errors import PlanError
from kernels_integration.reference import selection

PROMPT = tuple(range(100, 340))


def stream(**settings) -> tuple[int, ...]:
    group = InlineGroup(resolve(EngineArgs(kv_cache_memory_bytes=2**24, **settings)))
    try:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for name in ("a", "b"):
            group.submit(
                Request(request_id=name, prompt_token_ids=PROMPT, params=params, seed=1, eos_token_ids=())
            )
        tokens: list[int] = []
        while group.has_work:
            for update in group.step():
                if isinstance(update, RequestUpdate) and update.request_id == "a":
                    tokens.extend(update.token_ids)
    finally:
        group.close()
    return tuple(tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_speculative_tokens": 3},
        {
            "num_speculative_tokens": 2,
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "cp_kv_cache_interleave_size": 4,
            "dcp_comm_backend": "ag_rs",
            "max_num_batched_tokens": 100,
        },
    ],
    ids=["one rank", "dcp"],
)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_sound_groups_have_nothing_to_report(monkeypatch, settings, fixed_shapes):
    """Prefill in chunks, drafts, verifies and prefix hits, past index_topk: the streams are the same."""
    build = functools.partial(build_shard, fixed_shapes=fixed_shapes)
    monkeypatch.setattr("actors.inline_group.build_shard", build)
    watched = stream(check_plans=True, **settings)
    assert len(watched) == 8
    assert watched == stream(**settings)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_a_fault_is_reported_with_step_rank_layer_and_row(monkeypatch, fixed_shapes):
    build = functools.partial(build_shard, fixed_shapes=fixed_shapes)
    monkeypatch.setattr("actors.inline_group.build_shard", build)
    real, calls = selection.select_topk, []

    def faulty(*arguments):
        chosen = real(*arguments)
        calls.append(chosen)
        if len(calls) == 3:  # the third layer that selects
            chosen.kv_indices[-1] = chosen.kv_indices[-2]
        return chosen

    monkeypatch.setattr(selection, "select_topk", faulty)
    with pytest.raises(PlanError, match=r"^step 1, rank 0: layer 2: .*a slot twice, near row \d+") as info:
        stream(check_plans=True, attention_backend="torch")
    last_row = int(re.findall(r"row (\d+)", str(info.value))[-1])
    assert last_row == calls[2].kv_indptr.shape[0] - 2
    assert torch.equal(calls[2].kv_indices[-1:], calls[2].kv_indices[-2:-1])
