"""Streams stay what they are while k changes by measurement, down to 0 and back, in both modes."""

import itertools

import pytest

from actors.inline_group import InlineGroup
from tests.support.groups import group_config, request, run, text_prompts

NEW_TOKENS = 90


def _requests():
    prompts = text_prompts([5, 40, 66, 130])
    greedy = [request(f"greedy-{len(p)}", p, max_tokens=NEW_TOKENS) for p in prompts]
    sampled = [
        request(f"sampled-{len(p)}", p, max_tokens=NEW_TOKENS, temperature=1.0, seed=7 + i)
        for i, p in enumerate(prompts)
    ]
    return greedy + sampled


@pytest.fixture(scope="module")
def streams() -> dict[str, list[int]]:
    group = InlineGroup(group_config())
    collected = run(group, _requests())
    group.close()
    return {name: c.token_ids for name, c in collected.items()}


@pytest.mark.product(1)
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("drafts_look", ["cheap", "dear"])
def test_streams_do_not_depend_on_what_is_measured(streams, scheduling, tp, drafts_look) -> None:
    """The clock makes steps with drafts look as dear as is wanted; every k occurs."""
    ticks = itertools.count()
    group = InlineGroup(
        group_config(
            num_speculative_tokens=4,
            dynamic_speculative_decoding=True,
            scheduling=scheduling,
            tensor_parallel_size=tp,
            decode_context_parallel_size=tp,
        ),
        clock=lambda: next(ticks) * 1e-3 + extra_s[0],
    )
    extra_s = [0.0]
    k_seen: list[int] = []
    received: dict[str, list[int]] = {name: [] for name in streams}
    for r in _requests():
        group.submit(r)
    while group.has_work:
        for update in group.step():
            received[update.request_id] += update.token_ids
        last_k = group.stats().last_k
        k_seen.append(len(last_k) - 1)
        if drafts_look == "dear":
            extra_s[0] += 0.1 * (len(last_k) - 1)
    group.close()
    assert received == streams
    assert max(k_seen) == 4
    assert 0 in k_seen
    if drafts_look == "dear":
        assert k_seen.count(0) > len(k_seen) / 2
