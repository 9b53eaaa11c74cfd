"""Whatever a request's logits, numbers or rules do: it fails alone, with its reason; the group goes on."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.inline_group import InlineGroup
from actors.requests import Request
from actors.sampling_params import SamplingParams
from actors.shard import build, slot_rules
from tests.support.groups import Collected, group_config, request, run
from tests.support.tiny_models import Weights, write_tiny_model

POISON = 17
"""The token whose embedding is NaN in the groups of these tests."""
RAISING = ((90, 91, 92),)
"""Bad words that a rule of these tests trips over."""
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = Weights(residual_scale=0.15, mtp_align=0.8)
    return write_tiny_model(tmp_path_factory.mktemp("model"), "deepseek_v32", weights)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model = vars(build)["load_model"]

    def poisoning(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        row = POISON - model.vocab_start
        if 0 <= row < len(model.embed_tokens):
            model.embed_tokens[row] = torch.nan
        return model

    monkeypatch.setattr(build, "load_model", poisoning)
    banned = slot_rules._Slot.banned

    def raising(self: Any, position: int, drafts: Any) -> list[int]:
        if self.spec.bad_words == RAISING and threading.current_thread().name != "shard-0":
            raise ZeroDivisionError("a rule with a fault")
        return banned(self, position, drafts)

    monkeypatch.setattr(slot_rules._Slot, "banned", raising)


def prompt(length: int) -> tuple[int, ...]:
    ids = torch.randint(20, 101, (length,), generator=torch.Generator().manual_seed(length))
    return tuple(ids.tolist())


def healthy() -> list[Request]:
    never = {POISON: -100.0}
    plain = [request(f"greedy-{n}", prompt(n), max_tokens=NEW_TOKENS, logit_bias=never) for n in (3, 20)]
    return [
        *plain,
        request("sampled", prompt(30), max_tokens=NEW_TOKENS, temperature=0.8, seed=5, logit_bias=never),
        request("cut", prompt(9), max_tokens=NEW_TOKENS, temperature=1.0, top_p=0.9, logit_bias=never),
        request("best", prompt(20), max_tokens=NEW_TOKENS, temperature=1.0, top_p=1e-46, logit_bias=never),
    ]


def doomed() -> dict[str, tuple[Request, int, str]]:
    """By name the request, the tokens before it fails, and its code."""
    ids = list(prompt(30))
    last, early = ids.copy(), ids.copy()
    last[-1], early[2] = POISON, POISON
    only = {"allowed_token_ids": (POISON,), "max_tokens": NEW_TOKENS}
    nothing = request("nothing is left", ids, allowed_token_ids=(50,), max_tokens=NEW_TOKENS)
    return {
        "last": (request("last", last, max_tokens=NEW_TOKENS), 0, "internal"),
        "early": (request("early", early, max_tokens=NEW_TOKENS, temperature=1.0), 0, "internal"),
        "in a verify": (request("in a verify", ids, **only), 1, "invalid_request"),
        "nothing is left": (
            msgspec.structs.replace(nothing, bad_words=((50, 50), (50,))),
            0,
            "invalid_request",
        ),
    }


def streams(collected: dict[str, Collected]) -> dict[str, list[int]]:
    return {name: c.token_ids for name, c in collected.items() if c.failed is None}


def config(path: Path, **overrides: Any) -> Any:
    values = {"model_path": str(path), "max_model_len": 256, "block_size": 4, "num_kv_blocks": 64}
    return group_config(**values, max_num_batched_tokens=48, **overrides)


@pytest.fixture(scope="module")
def plain(path: Path) -> dict[str, list[int]]:
    """Before any poison."""
    group = InlineGroup(config(path))
    found = streams(run(group, healthy(), together=False))
    group.close()
    assert found["best"] == found["greedy-20"]
    return found


@pytest.mark.product(6)
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(("k", "rejection"), [(0, "coupled"), (3, "coupled"), (3, "standard")])
def test_only_the_request_of_a_row_without_a_token_fails(path, plain, scheduling, tp, dcp, k, rejection):
    """Twice: the second time freed blocks hold NaN, and the cache what was published of failed requests."""
    group = InlineGroup(
        config(
            path,
            scheduling=scheduling,
            tensor_parallel_size=tp,
            decode_context_parallel_size=dcp,
            num_speculative_tokens=k,
            rejection_sampling=rejection,
        )
    )
    for _ in range(2):
        expected = doomed()
        if dcp > 1:  # the merge of ranks leaves a NaN out, as contracts/dcp.md has it
            del expected["early"]
        raising = msgspec.structs.replace(
            request("raising", prompt(25), max_tokens=NEW_TOKENS), bad_words=RAISING
        )
        requests = [r for r, _, _ in expected.values()]
        found = run(group, [*requests[:2], *healthy(), raising, *requests[2:]])
        for name, (_, num_tokens, code) in expected.items():
            failed = found[name].failed
            assert failed is not None, name
            assert (len(found[name].token_ids), failed.code) == (num_tokens, code)
            assert f"no token can be drawn at position {num_tokens} of the completion" in failed.message
        if tp > 1 and (rejection == "coupled"):
            assert found["raising"].failed is not None
            assert found["raising"].token_ids == []
        names = [n for n in plain if rejection == "coupled" or n.startswith(("greedy", "best"))]
        assert {n: found[n].token_ids for n in names} == {n: plain[n] for n in names}
        stats = group.stats()
        assert (stats.running, stats.waiting, stats.num_used_blocks) == (0, 0, 0)
    group.close()


SMALLEST = 5e-324
EXTREMES = st.builds(
    dict,
    temperature=st.sampled_from([0, SMALLEST, 1e-46, 1e-5, 1e-3, 1.0, 100, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 101, 2**63 - 1]),
    top_p=st.sampled_from([SMALLEST, 1e-46, 1e-8, 0.5, 1 - 1e-16, 1]),
    min_p=st.sampled_from([0, SMALLEST, 1e-46, 0.5, 1]),
    presence_penalty=st.sampled_from([-2, -SMALLEST, 0, 2]),
    frequency_penalty=st.sampled_from([-2, 0, SMALLEST, 2]),
    repetition_penalty=st.sampled_from([0.01, 1 + 1e-15, 1, 100]),
    logit_bias=st.sampled_from(
        [None, {}, {0: 100, 100: -100}, dict.fromkeys(range(101), -100.0), {5: SMALLEST}]
    ),
    allowed_token_ids=st.sampled_from([None, (100,), tuple(range(101)), (0, 0, 0)]),
    seed=st.sampled_from([0, 2**63, 2**64 - 1, -(2**63)]),
    max_tokens=st.sampled_from([1, 2, NEW_TOKENS]),
    stop_token_ids=st.sampled_from([(), (0, 100), tuple(range(101))]),
    logprobs=st.sampled_from([None, 0, 5, 101]),
    prompt_logprobs=st.sampled_from([None, 0, 101]),
    ignore_eos=st.booleans(),
)


def _extreme(i: int, params: dict[str, Any], num_before: int) -> Request:
    sampling = SamplingParams(**params, min_tokens=params["max_tokens"] * (i % 2))
    return Request(
        request_id=f"extreme-{i}",
        prompt_token_ids=prompt(num_before),
        params=sampling,
        seed=params["seed"] % 2**64,
        eos_token_ids=(1,),
        bad_words=((100,), (0, 0)) if i % 3 == 0 else (),
    )


@pytest.fixture(scope="module")
def groups(path: Path):
    made = [
        InlineGroup(config(path, num_speculative_tokens=k, rejection_sampling=r, scheduling=s, dtype=d))
        for k, r, s, d in [
            (3, "coupled", "deferred", "float64"),
            (3, "standard", "sync", "float64"),
            (0, "coupled", "sync", "float32"),
        ]
    ]
    yield made
    for group in made:
        group.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=st.lists(st.tuples(EXTREMES, st.sampled_from([1, 5, 40])), min_size=1, max_size=6),
    which=st.sampled_from([0, 1, 2]),
)
def test_legal_extremes_end_as_requests_do_and_leave_others_alone(groups, plain, cases, which):
    """A request ends, or fails because its own rules leave nothing; healthy streams stay what they are."""
    group = groups[which]
    extremes = [_extreme(i, params, n) for i, (params, n) in enumerate(cases)]
    found = run(group, [*extremes[::2], *healthy(), *extremes[1::2]])
    for req in extremes:
        ended = found[req.request_id]
        if ended.failed is None:
            assert ended.last.finish_reason in ("stop", "length")
            assert all(0 <= token < 101 for token in ended.token_ids)
        else:
            assert ended.failed.code == "invalid_request"
            assert req.params.allowed_token_ids is not None or req.params.min_tokens
    if which == 0:
        assert {n: found[n].token_ids for n in plain} == plain
    assert all(found[n].failed is None for n in plain)
    assert group.stats().num_used_blocks == 0
