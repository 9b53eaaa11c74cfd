"""--attention-backend decides who computes: every operation goes to the backend of that name."""

import dataclasses
import functools
import sys
import types
from collections import Counter
from typing import ClassVar

import pytest

from actors.inline_group import InlineGroup
from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from actors.shard.build import build_shard
from cluster.config import EngineArgs
from cluster.config.resolve import resolve
from kernels_integration import registry
from kernels_integration.backend import Backend
from kernels_integration.errors import ConfigError
from kernels_integration.reference.backend import TorchBackend

PROMPT = tuple(range(100, 162))
"""Steps are dense up to 64 tokens, then sparse."""
# Every operation but the one that only DCP needs, and that of shards of fixed shapes.
OPERATIONS = {
    name for name, member in vars(Backend).items() if callable(member) and not name.startswith("_")
} - {"merge", "draw"}


class Counting(TorchBackend):
    calls: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name):
        if name in OPERATIONS or name == "draw":
            Counting.calls[name] += 1
        return super().__getattribute__(name)


def stream(**settings) -> list[int]:
    group = InlineGroup(
        resolve(EngineArgs(kv_cache_memory_bytes=2**24, num_speculative_tokens=2, **settings))
    )
    try:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        group.submit(
            Request(request_id="a", prompt_token_ids=PROMPT, params=params, seed=1, eos_token_ids=())
        )
        tokens = []
        while group.has_work:
            for update in group.step():
                assert isinstance(update, RequestUpdate)
                tokens.extend(update.token_ids)
    finally:
        group.close()
    return tokens


def test_every_operation_is_the_chosen_backends(monkeypatch):
    module = types.ModuleType("counting_backend")
    vars(module)["refusal"] = lambda needs: None
    vars(module)["create"] = lambda needs: Counting()
    monkeypatch.setitem(sys.modules, "counting_backend", module)
    entry = dataclasses.replace(
        registry._ENTRIES["triton"], module="counting_backend", devices=frozenset({"cpu"})
    )
    monkeypatch.setitem(registry._ENTRIES, "triton", entry)
    Counting.calls.clear()
    assert stream(attention_backend="triton") == stream(attention_backend="torch")
    assert set(Counting.calls) == OPERATIONS
    monkeypatch.setattr("actors.inline_group.build_shard", functools.partial(build_shard, fixed_shapes=True))
    Counting.calls.clear()
    stream(attention_backend="triton")
    assert set(Counting.calls) == OPERATIONS | {"draw"}


@pytest.mark.parametrize("name", ["triton", "aiter"])
def test_a_backend_that_cannot_compute_here_ends_the_start_with_the_reason(name):
    with pytest.raises(ConfigError, match=f"attention-backend {name} cannot be used: it computes on cuda"):
        stream(attention_backend=name)
