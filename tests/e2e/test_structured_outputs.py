"""Constrained streams: one for every k, topology, batch, mode and preemption; legal; fairly drawn.

In float64, as tests/e2e/test_one_stream.py: streams of one rank without drafts, one request at a time, are
the yardstick.
"""

import collections
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from actors import inline_group
from actors.inline_group import InlineGroup
from actors.requests import Progress, Request
from actors.shard import slot_grammars
from actors.shard.build import build_shard
from tests.support.groups import EOS, Collected, group_config, load_tokenizer, request, run, text_prompts

pytest.importorskip("xgrammar")

PROMPT_LENGTHS = [5, 40, 70]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
TOOL = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</f>",
        }
    ],
    "at_least_one": True,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": r"(ab|cd)[a-z ]{3,12}\."},
    "choice": {"choice": ["yes", "no", "not at all"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | [0-9]{2,5}'},
    "tag": {"structural_tag": {"type": "structural_tag", "format": TOOL}},
}
LEGAL = {
    "regex": re.compile(r"(ab|cd)[a-z ]{3,12}\."),
    "choice": re.compile("yes|no|not at all"),
    "grammar": re.compile(r"\(*[0-9]{2,5}\)*"),
}


def requests() -> list[Request]:
    prompts = itertools.cycle(text_prompts(PROMPT_LENGTHS))
    found = []
    for name, constraint in CONSTRAINTS.items():
        common = {"max_tokens": 56, "ignore_eos": False, "structured_outputs": constraint}
        found += [
            request(f"{name}-greedy", next(prompts), **common),
            request(f"{name}-sampled", next(prompts), temperature=1.0, seed=len(found), **common),
        ]
    more: dict[str, dict[str, Any]] = {
        "penalised": {"presence_penalty": 1.5, "repetition_penalty": 1.2},
        "biased": {"logit_bias": {11: 5.0, EOS: 3.0}, "top_k": 20},
        "ignores-eos": {"ignore_eos": True, "max_tokens": 12, "structured_outputs": CONSTRAINTS["choice"]},
        "stopped": {"stop_token_ids": tuple(load_tokenizer().encode(",", add_special_tokens=False).ids)},
        "free": {"structured_outputs": None, "max_tokens": 16},
    }
    for i, (name, params) in enumerate(more.items()):
        common = {"max_tokens": 40, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}} | params
        found.append(request(name, next(prompts), temperature=0.8, seed=70 + i, **common))
    return found


def told(collected: dict[str, Collected]) -> dict[str, tuple[list[int], Any]]:
    return {name: (c.token_ids, c.last.finish_reason) for name, c in collected.items()}


@pytest.fixture(scope="module")
def streams() -> dict[str, tuple[list[int], Any]]:
    """One rank, no drafts, one request at a time."""
    group = InlineGroup(group_config())
    collected = run(group, requests(), together=False)
    group.close()
    return told(collected)


def test_every_stream_is_what_its_constraint_allows(streams: dict[str, tuple[list[int], Any]]) -> None:
    tokenizer = load_tokenizer()
    finished = [name for name, (_, reason) in streams.items() if reason == "stop"]
    assert len(finished) > 0.6 * len(streams)
    for name in finished:
        kind, text = name.split("-")[0], tokenizer.decode(streams[name][0])
        if kind in LEGAL:
            assert LEGAL[kind].fullmatch(text), text
        elif kind == "tag":
            inside = re.findall("<f>(.*?)</f>", text, re.DOTALL)
            assert inside
            for part in inside:
                jsonschema.validate(json.loads(part), SCHEMA)
        elif kind == "object":
            assert isinstance(json.loads(text), dict)
        elif kind in ("json", "penalised", "biased"):
            jsonschema.validate(json.loads(text), SCHEMA)
    tokens, reason = streams["ignores-eos"]
    first = tokens.index(EOS)
    assert LEGAL["choice"].fullmatch(tokenizer.decode(tokens[:first]))
    assert (set(tokens[first:]), len(tokens), reason) == ({EOS}, 12, "length")
    assert tokenizer.decode(streams["stopped"][0]).endswith(",")


CONFIGS: list[dict[str, Any]] = [
    {
        "num_speculative_tokens": k,
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "scheduling": mode,
    }
    for k in (0, 1, 2, 3)
    for tp, dcp in ((1, 1), (2, 1), (2, 2), (4, 2))
    for mode in ("sync", "deferred")
] + [
    {"num_speculative_tokens": 3, "max_num_batched_tokens": 33},
    {"num_speculative_tokens": 3, "num_kv_blocks": 40, "block_size": 2, "scheduling": "deferred"},
    {"num_speculative_tokens": 0, "num_kv_blocks": 40, "block_size": 2},
]


@pytest.mark.product(2)
@pytest.mark.parametrize(
    "config",
    CONFIGS,
    ids=lambda c: "-".join(f"{''.join(w[0] for w in name.split('_'))}{value}" for name, value in c.items()),
)
def test_one_stream(streams: dict[str, tuple[list[int], Any]], config: dict[str, Any]) -> None:
    group = InlineGroup(group_config(**config))
    collected = run(group, requests())
    stats = group.stats()
    group.close()
    assert told(collected) == streams
    if "num_kv_blocks" in config:
        assert stats.num_preemptions > 0
    if config["num_speculative_tokens"]:
        assert sum(stats.accepted) > 0


@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
def test_one_stream_in_fixed_shapes(
    streams: dict[str, tuple[list[int], Any]], scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard of accelerators: its masks are made on the host between passes."""
    monkeypatch.setattr(inline_group, "build_shard", functools.partial(build_shard, fixed_shapes=True))
    group = InlineGroup(group_config(num_speculative_tokens=2, tensor_parallel_size=2, scheduling=scheduling))
    collected = run(group, requests())
    group.close()
    assert told(collected) == streams


def test_new_shards_go_on_from_the_committed_tokens(streams: dict[str, tuple[list[int], Any]]) -> None:
    """Their matchers are made from the tokens alone."""
    config = group_config(num_speculative_tokens=3)
    group = InlineGroup(config)
    asked = requests()
    collected = {r.request_id: Collected() for r in asked}
    for one in asked:
        group.submit(one)
    for epoch in itertools.count(1):
        for _ in range(4):
            for update in group.step():
                collected[update.request_id].add(update)
        if not group.has_work:
            break
        group._shards.close()
        group._shards = inline_group._start_shards(config, group._shard_spans)
        group._coordinator.restart(epoch)
    group.close()
    assert epoch > 2
    assert told(collected) == streams


def test_a_new_coordinator_goes_on_from_what_was_emitted(
    group: InlineGroup, streams: dict[str, tuple[list[int], Any]]
) -> None:
    [asked] = [r for r in requests() if r.request_id == "penalised"]
    tokens, reason = streams["penalised"]
    resumed = replace(asked, progress=Progress(token_ids=tuple(tokens[:7])))
    assert told(run(group, [resumed]))["penalised"] == (tokens[7:], reason)


def test_drafts_are_accepted_more_often_where_a_form_tells_what_follows() -> None:
    group = InlineGroup(group_config(num_speculative_tokens=3))
    accepted: dict[str, float] = {}
    for name, constraint in {"free": None, "json": {"json": SCHEMA}}.items():
        before = group.stats()
        prompts = itertools.cycle(text_prompts(PROMPT_LENGTHS))
        common = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": constraint is None}
        run(
            group,
            [
                request(f"{name}-{seed}", next(prompts), seed=seed, structured_outputs=constraint, **common)
                for seed in range(9)
            ],
        )
        after = group.stats()
        proposed = sum(after.proposed) - sum(before.proposed)
        accepted[name] = (sum(after.accepted) - sum(before.accepted)) / proposed
    group.close()
    assert accepted["json"] > 1.2 * accepted["free"], accepted


@pytest.fixture
def group() -> Iterator[InlineGroup]:
    found = InlineGroup(group_config(num_speculative_tokens=3))
    yield found
    found.close()


def test_a_row_without_a_legal_token_fails_its_own_request(
    group: InlineGroup, streams: dict[str, tuple[list[int], Any]]
) -> None:
    prompt = text_prompts([40])[0]
    common = {"max_tokens": 20, "ignore_eos": False, "structured_outputs": {"choice": ["yes"]}}
    doomed = [
        request("min", prompt, min_tokens=12, **common),
        request("allowed", prompt, allowed_token_ids=(EOS, 50), temperature=1.0, **common),
        replace(request("bad", prompt, **common), bad_words=((EOS,),)),
    ]
    healthy = [r for r in requests() if r.request_id in ("json-sampled", "free")]
    collected = run(group, [*doomed, *healthy])
    for one in doomed:
        failed = collected[one.request_id].failed
        assert failed is not None
        assert failed.code == "invalid_request"
        assert "structured_outputs" in failed.message
    assert load_tokenizer().decode(collected["min"].token_ids) == "yes"
    for one in healthy:
        assert told({one.request_id: collected[one.request_id]})[one.request_id] == streams[one.request_id]


def test_a_grammar_that_shards_cannot_have_fails_its_own_request(group: InlineGroup) -> None:
    """Front ends refuse it; a request that came past them ends nobody else."""
    prompt = text_prompts([5])[0]
    asked = [
        request("broken", prompt, max_tokens=4, structured_outputs={"regex": "a("}),
        request("whole", prompt, max_tokens=4, structured_outputs={"regex": "[a-z]*"}),
    ]
    collected = run(group, asked)
    assert collected["broken"].failed is not None
    assert collected["whole"].failed is None


@pytest.mark.parametrize(
    "constraint", [{"regex": "(.?){4000}"}, {"grammar": "root ::= root root root | [a-z ]"}]
)
def test_a_grammar_that_takes_too_long_fails_its_own_request(
    streams: dict[str, tuple[list[int], Any]], constraint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Front ends refuse it; one that came past them ends nobody else, whose tokens are the same."""
    monkeypatch.setattr(slot_grammars, "MAX_CALL_S", 0.05)
    group = InlineGroup(group_config(num_speculative_tokens=3, tensor_parallel_size=2))
    slow = request(
        "slow", text_prompts([40])[0], max_tokens=200, temperature=1.0, structured_outputs=constraint
    )
    healthy = [r for r in requests() if r.request_id in ("tag-sampled", "free")]
    collected = run(group, [slow, *healthy])
    group.close()
    failed = collected["slow"].failed
    assert failed is not None
    assert failed.code == "invalid_request"
    assert "structured_outputs takes too much time" in failed.message
    for one in healthy:
        assert told({one.request_id: collected[one.request_id]})[one.request_id] == streams[one.request_id]


def test_a_request_with_a_grammar_has_one_token_step_in_flight() -> None:
    group = InlineGroup(group_config(num_speculative_tokens=2, scheduling="deferred"))
    prompt = text_prompts([5])[0]
    group.submit(request("grammar", prompt, max_tokens=30, structured_outputs={"regex": "[a-z]*"}))
    group.submit(request("free", prompt, max_tokens=30))
    most: collections.Counter[str] = collections.Counter()
    while group.has_work:
        group.step()
        in_flight = collections.Counter(
            rows.request.request.request_id
            for schedule in group._coordinator._steps.schedules
            for rows in schedule.verifies + schedule.chunks
        )
        most |= in_flight
        while (step := group._coordinator.schedule()) is not None:
            group._shards.send(step)
            most |= collections.Counter(
                rows.request.request.request_id
                for schedule in group._coordinator._steps.schedules
                for rows in schedule.verifies + schedule.chunks
            )
    group.close()
    assert most["grammar"] == 1
    assert most["free"] == 2
