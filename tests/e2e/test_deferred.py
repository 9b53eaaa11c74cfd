"""Deferred mode with the real model: a step is sent before the last has reported, and nobody can tell."""

import msgspec
import pytest

from actors.inline_group import InlineGroup
from actors.requests import Request, SequenceKey
from tests.support.groups import group_config, request, run, text_prompts

NEW_TOKENS = 18


def _requests() -> list[Request]:
    prompts = text_prompts([5, 40, 66, 130])
    requests = [request(f"greedy-{len(p)}", p, max_tokens=NEW_TOKENS - i) for i, p in enumerate(prompts)]
    requests += [
        request(f"sampled-{len(p)}", p, max_tokens=NEW_TOKENS + i, temperature=1.0, seed=7 + i)
        for i, p in enumerate(prompts)
    ]
    penalised = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    requests.append(request("penalised", prompts[1], max_tokens=NEW_TOKENS, **penalised))
    requests.append(request("one token", prompts[0], max_tokens=1))
    return requests


def _with_params(r: Request, **params) -> Request:
    return msgspec.structs.replace(r, params=msgspec.structs.replace(r.params, **params))


@pytest.fixture(scope="module")
def streams() -> dict[str, list[int]]:
    """One rank, no drafts, one request at a time, sync."""
    group = InlineGroup(group_config(enable_prefix_caching=False))
    collected = run(group, _requests(), together=False)
    group.close()
    return {name: c.token_ids for name, c in collected.items()}


def _run(requests: list[Request], *, together: bool = True, **config):
    group = InlineGroup(group_config(**config))
    try:
        return run(group, requests, together=together), group.stats()
    finally:
        group.close()


@pytest.mark.product(2)
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_streams_are_those_of_sync_mode(streams, tp, dcp, k) -> None:
    topology = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp}
    collected, _ = _run(_requests(), scheduling="deferred", num_speculative_tokens=k, **topology)
    assert {name: c.token_ids for name, c in collected.items()} == streams
    for name, c in collected.items():
        assert c.last.num_completion_tokens == len(streams[name])
        assert c.last.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 3])
def test_alone_and_to_the_last_block(streams, k) -> None:
    """The pool holds just one request: rows of rejected drafts would lie beyond it."""
    requests = [r for r in _requests() if len(r.prompt_token_ids) == 40]
    num_blocks = -(-(40 + NEW_TOKENS + 1 - 1) // 4)
    collected, stats = _run(
        requests,
        scheduling="deferred",
        num_speculative_tokens=k,
        block_size=4,
        num_kv_blocks=num_blocks,
        enable_prefix_caching=False,
    )
    assert {name: c.token_ids for name, c in collected.items()} == {
        r.request_id: streams[r.request_id] for r in requests
    }
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize("k", [0, 3])
def test_stops_with_a_step_in_flight(streams, k) -> None:
    """Each stream ends at its own tenth token; the slot is taken at once by the next request."""
    stopping = [
        _with_params(r, stop_token_ids=(streams[r.request_id][9],))
        for r in _requests()
        if len(streams[r.request_id]) > 10
    ]
    collected, stats = _run(
        stopping, scheduling="deferred", num_speculative_tokens=k, max_num_seqs=2, max_num_batched_tokens=40
    )
    for r in stopping:
        stream = streams[r.request_id]
        assert collected[r.request_id].token_ids == stream[: stream.index(stream[9]) + 1]
        assert collected[r.request_id].last.finish_reason == "stop"
    assert stats.num_used_blocks == 0


@pytest.mark.parametrize("k", [0, 3])
def test_preemption_on_a_tiny_pool(streams, k) -> None:
    collected, stats = _run(
        _requests(),
        scheduling="deferred",
        num_speculative_tokens=k,
        block_size=2,
        num_kv_blocks=76,
        enable_prefix_caching=False,
    )
    assert stats.num_preemptions > 0
    assert {name: c.token_ids for name, c in collected.items()} == streams


def test_aborts_with_steps_in_flight(streams) -> None:
    """Blocks of an aborted request are used by the very next message."""
    group = InlineGroup(
        group_config(scheduling="deferred", num_speculative_tokens=3, block_size=4, num_kv_blocks=60)
    )
    requests = {r.request_id: r for r in _requests()}
    watched = {"greedy-5", "sampled-66"}
    for r in requests.values():
        group.submit(r)
    received: dict[str, list[int]] = {name: [] for name in watched}
    others = sorted(requests.keys() - watched)
    step = 0
    while group.has_work:
        for update in group.step():
            if update.request_id in watched:
                received[update.request_id] += update.token_ids
        if step % 2 == 0 and others:
            group.abort([SequenceKey(others.pop())])
        step += 1
    group.close()
    assert received == {name: streams[name] for name in watched}
