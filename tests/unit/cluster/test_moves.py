"""Sequences whose group is lost: where they go on, what they bring, and when they are given up."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from cluster.answering.answering import MAX_MOVES, MAX_MOVES_IN_VAIN, Answering
from cluster.answering.group import Drained
from kernels_integration.errors import InvalidRequestError, LetGoError, UnavailableError
from tests.support.scripted_group import Script, ScriptedGroup, until, update

LOST = UnavailableError("the group is lost")


def request(n: int = 1, **params: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=(10, 11),
        params=SamplingParams(n=n, max_tokens=6, **params),
        seed=1,
        eos_token_ids=(),
    )


def counting(stop_at: int, end: Any = LOST) -> Callable[[Request], Script]:
    """Tokens 0, 1, ... 5 from where the request is, two a step, until stop_at; then `end`."""

    def script(asked: Request) -> Script:
        done = len(asked.progress.token_ids) if asked.progress else 0
        steps: list[Any] = []
        for first in range(done, min(stop_at, 6), 2):
            is_last = first == 4
            steps.append(
                update(
                    asked,
                    [first, first + 1],
                    first,
                    num_cached_tokens=1,
                    num_draft_tokens=first,
                    num_held=0 if is_last else 1,
                    finish_reason="length" if is_last else None,
                )
            )
        return steps if steps and steps[-1].finish_reason else [*steps, end]

    return script


async def collect(answering: Answering, asked: Request) -> list[RequestUpdate]:
    return [found async for found in answering.run(asked)]


def tokens_of(updates: list[RequestUpdate], index: int = 0) -> list[int]:
    return [token for found in updates if found.index == index for token in found.token_ids]


@pytest.mark.parametrize("num_told", [0, 2, 4])
async def test_a_lost_groups_sequences_go_on_where_they_were(num_told: int) -> None:
    lost, other = ScriptedGroup(counting(num_told)), ScriptedGroup(counting(6))
    other.healthy = False
    answering = Answering([lost, other])

    def lose(asked: Request) -> Script:
        lost.healthy, other.healthy = False, True
        return counting(num_told)(asked)

    lost.script = lose
    updates = await collect(answering, request(logprobs=2, prompt_logprobs=1))
    assert tokens_of(updates) == list(range(6))
    assert [p.token_id for found in updates for p in found.logprobs] == list(range(6))
    [moved] = other.requests
    assert moved.incarnation != lost.requests[0].incarnation
    assert moved.seed == lost.requests[0].seed
    if num_told:
        assert moved.progress is not None
        assert moved.progress.token_ids == tuple(range(num_told)), "those that are held too"
        assert (moved.progress.num_cached_tokens, moved.progress.num_draft_tokens) == (1, num_told - 2)
        assert moved.params.prompt_logprobs is None, "they were told"
    else:
        assert moved.progress is None
        assert moved.params == lost.requests[0].params
    assert not answering.groups._num_sequences.total()


async def test_each_of_n_sequences_moves_alone() -> None:
    lost, other = ScriptedGroup(), ScriptedGroup(counting(6))
    other.healthy = False
    answering = Answering([lost, other])

    def script(asked: Request) -> Script:
        other.healthy = True
        return counting(2)(asked) if asked.index == 1 else counting(6)(asked)

    lost.script = script
    updates = await collect(answering, request(n=3))
    assert [tokens_of(updates, index) for index in range(3)] == [list(range(6))] * 3
    assert [asked.index for asked in other.requests] == [1]


async def test_it_waits_for_a_group_that_recovers() -> None:
    group = ScriptedGroup()
    answering = Answering([group])

    def lose(asked: Request) -> Script:
        group.healthy, group.is_recovering, group.script = False, True, counting(6)
        return counting(2)(asked)

    group.script = lose
    call = asyncio.create_task(collect(answering, request()))
    await until(lambda: group.is_recovering and not group.live)
    await asyncio.sleep(0.1)
    assert not call.done()
    group.healthy = True
    assert tokens_of(await call) == list(range(6))


async def test_a_new_request_waits_for_a_recovery_as_long_as_its_patience_lasts() -> None:
    group = ScriptedGroup(counting(6))
    group.healthy, group.is_recovering, group.message = False, True, "recovering: shard 1 is lost"
    with pytest.raises(UnavailableError, match="recovering: shard 1 is lost"):
        await collect(Answering([group], patience_s=0.05), request())
    call = asyncio.create_task(collect(Answering([group], patience_s=60), request()))
    await asyncio.sleep(0.05)
    group.healthy = True
    assert tokens_of(await call) == list(range(6))
    group.healthy = group.is_recovering = False
    with pytest.raises(UnavailableError):
        await collect(Answering([group], patience_s=60), request())


async def test_without_another_group_the_call_fails_with_the_cause() -> None:
    group = ScriptedGroup()

    def lose(asked: Request) -> Script:
        group.healthy = False
        return counting(2)(asked)

    group.script = lose
    with pytest.raises(UnavailableError, match="the group is lost"):
        await collect(Answering([group]), request())


async def test_other_errors_are_its_own_and_do_not_move_it() -> None:
    first = ScriptedGroup(counting(2, InvalidRequestError("its rules leave no token", field="logit_bias")))
    second = ScriptedGroup(counting(6))
    with pytest.raises(InvalidRequestError):
        await collect(Answering([first, second]), request())
    assert not second.requests


async def test_a_request_that_gets_nowhere_is_given_up() -> None:
    group = ScriptedGroup(counting(0))
    with pytest.raises(UnavailableError, match=rf"moved {MAX_MOVES_IN_VAIN} times without another token"):
        await collect(Answering([group]), request())
    assert len(group.requests) == 1 + MAX_MOVES_IN_VAIN


async def test_a_request_whose_groups_are_lost_again_and_again_is_given_up_though_it_comes_on() -> None:
    def one_more(asked: Request) -> Script:
        done = len(asked.progress.token_ids) if asked.progress else 0
        return [update(asked, [done], done), UnavailableError("lost")]

    group = ScriptedGroup(one_more)
    with pytest.raises(
        UnavailableError, match=rf"moved {MAX_MOVES} times, and its last group was lost too: lost"
    ):
        await collect(Answering([group]), request())
    assert len(group.requests) == 1 + MAX_MOVES


async def test_a_moved_sequence_ends_where_it_runs_when_its_reader_leaves() -> None:
    lost, other = ScriptedGroup(), ScriptedGroup(lambda r: [update(r, [2, 3], 2), asyncio.Event()])
    other.healthy = False
    answering = Answering([lost, other])

    def lose(asked: Request) -> Script:
        lost.healthy, other.healthy = False, True
        return counting(2)(asked)

    lost.script = lose
    async with aclosing(answering.run(request())) as updates:
        await anext(updates)
        await anext(updates)
        assert other.live == {"r"}
    assert not other.live
    assert len(answering.live) == 0


async def test_a_drained_group_takes_nothing_and_its_sequences_go_on_elsewhere() -> None:
    gate = asyncio.Event()
    first, second = ScriptedGroup(), ScriptedGroup(counting(6))
    second.healthy = False
    answering = Answering([first, second])
    groups = answering.groups
    first.script = lambda asked: [*counting(2)(asked)[:1], gate, LetGoError("drained")]
    running = asyncio.create_task(collect(answering, request()))
    await until(lambda: bool(first.requests))
    second.healthy = True
    groups.drain(first, Drained(reason="it is drained"))
    assert groups.healthy, "the other one serves"
    assert groups.num_sequences_of(first) == 1, "what runs there may end there"
    assert tokens_of([u async for u in answering.run(replace(request(), request_id="new"))]) == list(range(6))
    assert [r.request_id for r in second.requests] == ["new"]
    gate.set()
    assert tokens_of(await running) == list(range(6))
    assert groups.num_sequences_of(first) == 0
    groups.undrain(first)
    assert groups.choose(request()) in (first, second)


async def test_with_every_group_drained_requests_are_refused_and_told_what_helps() -> None:
    group = ScriptedGroup()
    answering = Answering([group])
    answering.groups.drain(group, Drained(reason="it is drained; undrain it"))
    assert not answering.groups.healthy
    with pytest.raises(UnavailableError, match="undrain it"):
        await collect(answering, request())
    assert not group.requests


async def test_streams_wait_for_a_group_that_restarts() -> None:
    group = ScriptedGroup()
    answering = Answering([group])

    def script(asked: Request) -> Script:
        if asked.progress is not None:
            return counting(6)(asked)
        answering.groups.drain(group, Drained(reason="it is being restarted", returns=True))
        asyncio.get_running_loop().call_later(0.1, answering.groups.undrain, group)
        return counting(4, LetGoError("it is being restarted"))(asked)

    group.script = script
    assert tokens_of(await collect(answering, request())) == list(range(6))


async def test_being_moved_by_an_operator_is_held_against_nobody() -> None:
    group = ScriptedGroup()
    answering = Answering([group])
    left = iter(range(MAX_MOVES_IN_VAIN + MAX_MOVES + 2))
    group.script = lambda asked: (
        [LetGoError("drained")] if next(left, None) is not None else counting(6)(asked)
    )
    assert tokens_of(await collect(answering, request())) == list(range(6))


@pytest.mark.parametrize("num_told", [0, 2])
async def test_a_stream_ends_with_the_weights_that_it_began_with(num_told: int) -> None:
    old, new = ScriptedGroup(), ScriptedGroup(counting(6))
    answering = Answering([old, new])
    answering.groups.set_weights(new, 1)
    new.healthy = False

    def lose(asked: Request) -> Script:
        old.healthy, new.healthy = False, True
        return counting(num_told)(asked)

    old.script = lose
    if num_told:
        with pytest.raises(UnavailableError, match="lost"):
            await collect(answering, request())
        assert not new.requests, "tokens of two models would be no answer of either"
    else:
        assert tokens_of(await collect(answering, request())) == list(range(6))


def test_a_drained_group_says_why_while_the_others_serve() -> None:
    first, second = ScriptedGroup(), ScriptedGroup()
    groups = Answering([first, second]).groups
    groups.drain(second, Drained(reason="it is drained; `latentray undrain 1` lets it serve again"))
    assert groups.healthy
    assert (groups.is_open(first), groups.is_open(second)) == (True, False)
    assert groups.message == "group 1: it is drained; `latentray undrain 1` lets it serve again"
