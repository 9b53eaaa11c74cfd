"""Whole groups on a GPU: the streams of the CPU, with and without drafts, eager and as graphs."""

import logging

import pytest

from actors.inline_group import InlineGroup
from actors.shard.decode_graphs import DecodeGraphs
from tests.support.groups import group_config, request, run, text_prompts

pytestmark = pytest.mark.gpu
PROMPTS = text_prompts([12, 90, 200, 40])
"""Shorter and longer than the 64 tokens that the indexer selects."""


def streams(draws=((0.0, 0), (0.8, 0), (1.0, 5)), **settings) -> list[list[int]]:
    """Of requests that come and go together, each drawn by each (temperature, top_k)."""
    group = InlineGroup(group_config(**settings))
    requests = [
        request(
            f"{i}-{temperature}", prompt, seed=i, temperature=temperature, top_k=top_k, max_tokens=40 + 9 * i
        )
        for i, prompt in enumerate(PROMPTS)
        for temperature, top_k in draws
    ]
    return [collected.token_ids for collected in run(group, requests).values()]


@pytest.fixture(scope="module")
def of_the_cpu() -> list[list[int]]:
    return streams(dtype="float64", kv_cache_dtype="float64")


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "float64"), ("torch", "float32"), ("triton", "float32")]
)
def test_streams_are_those_of_the_cpu(of_the_cpu, backend, dtype, num_drafts):
    found = streams(
        device="cuda",
        attention_backend=backend,
        dtype=dtype,
        kv_cache_dtype=dtype,
        num_speculative_tokens=num_drafts,
    )
    assert found == of_the_cpu


@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
def test_graphs_replay_what_runs_eagerly(monkeypatch, caplog, scheduling):
    """In bfloat16, bit for bit: the same kernels on the same shapes."""
    settings = {
        "device": "cuda",
        "attention_backend": "triton",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "num_speculative_tokens": 3,
        "scheduling": scheduling,
    }
    replayed = []
    run_step = DecodeGraphs.run

    def recorded(self, shape, *inputs):
        replayed.append(shape in self._captured)
        return run_step(self, shape, *inputs)

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(DecodeGraphs, "run", recorded)
        as_graphs = streams(**settings)
    assert sum(replayed) > len(replayed) // 2
    assert not [record for record in caplog.records if "without CUDA graphs" in record.message]
    monkeypatch.setattr(DecodeGraphs, "_may_capture", lambda self, shape: False)
    assert streams(**settings) == as_graphs
