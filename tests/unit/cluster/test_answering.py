"""The one door: how calls end, what they leave, and the blocking way in."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import pytest

from actors.requests import Request, RequestUpdate
from actors.sampling_params import SamplingParams
from actors.stats import GroupStats
from cluster.answering.answering import Answering
from cluster.answering.engine import Engine
from cluster.answering.local_group import LocalGroup
from kernels_integration.errors import (
    AbortedError,
    DeadlineExceededError,
    DuplicateRequestError,
    OverloadedError,
    UnavailableError,
)
from tests.support.scripted_group import ScriptedGroup, echo, until, update


def request(request_id: str = "r", n: int = 1, max_tokens: int = 8) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(10, 11),
        params=SamplingParams(n=n, max_tokens=max_tokens),
        seed=1,
        eos_token_ids=(),
    )


def endless(asked: Request) -> Any:
    return [update(asked, [1]), asyncio.Event()]


async def collect(answering: Answering, asked: Request, **options: Any) -> list[RequestUpdate]:
    return [found async for found in answering.run(asked, **options)]


async def ended(answering: Answering, asked: Request, **options: Any) -> type[BaseException]:
    """How a call ends that is not answered, after its first update."""
    try:
        await collect(answering, asked, **options)
    except Exception as error:
        return type(error)
    raise AssertionError("it was answered")


async def test_n_sequences_of_one_incarnation_answer_a_request() -> None:
    group = ScriptedGroup()
    updates = await collect(Answering([group]), request(n=3))
    for index in range(3):
        mine = [u for u in updates if u.index == index]
        assert [t for u in mine for t in u.token_ids] == [10, 11] * 4
        assert [u.finish_reason for u in mine] == [None, None, "length"]
    assert len({r.incarnation for r in group.requests}) == 1
    assert [(r.request_id, r.index, r.params.n) for r in group.requests] == [("r", i, 1) for i in range(3)]
    assert len({r.seed for r in group.requests}) == 3


WAYS: dict[str, tuple[Callable[[Answering], Any], dict[str, Any], type[Exception]]] = {
    "abort": (lambda a: a.abort(["r", "unknown"]), {}, AbortedError),
    "deadline": (lambda a: None, {"time_left_s": 0.05}, DeadlineExceededError),
    "drain": (lambda a: asyncio.create_task(a.drain(0.02)), {}, UnavailableError),
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", WAYS)
async def test_every_end_from_outside_ends_the_sequences(way: str, n: int) -> None:
    act, options, error = WAYS[way]
    group = ScriptedGroup(endless)
    answering = Answering([group])
    call = asyncio.create_task(ended(answering, request(n=n), **options))
    await until(lambda: len(group.requests) == n)
    kept = act(answering)
    assert await call is error
    assert not group.live
    assert len(answering.live) == 0
    del kept


async def test_a_reader_that_leaves_or_is_cancelled_ends_the_sequences() -> None:
    group = ScriptedGroup(endless)
    answering = Answering([group])
    async with aclosing(answering.run(request(n=2))) as updates:
        await anext(updates)
        assert group.live == {"r"}
    assert not group.live
    call = asyncio.create_task(collect(answering, request(n=2)))
    await until(lambda: bool(group.live))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not group.live
    assert len(answering.live) == 0


@pytest.mark.parametrize("cause", [OverloadedError("full"), RuntimeError("a bug")])
async def test_when_one_sequence_fails_all_end_and_the_call_fails_with_it(cause: Exception) -> None:
    group = ScriptedGroup(lambda r: [update(r, [1]), cause] if r.index == 1 else endless(r))
    with pytest.raises(type(cause), match=str(cause)):
        await collect(Answering([group]), request(n=3))
    assert not group.live


async def test_what_is_admitted_can_be_ended_before_it_is_a_request() -> None:
    """While its prompt is tokenised, say."""
    answering = Answering([ScriptedGroup()])

    async def slow_to_begin() -> None:
        async with answering.admit("r"):
            await asyncio.Event().wait()

    call = asyncio.create_task(slow_to_begin())
    await until(lambda: len(answering.live) == 1)
    with pytest.raises(DuplicateRequestError, match="'r' belongs to a live request"):
        await collect(answering, request())
    answering.abort(["r"])
    with pytest.raises(AbortedError):
        await call
    assert await collect(answering, request())


async def test_after_an_end_from_outside_the_task_is_not_cancelled_any_more() -> None:
    answering = Answering([ScriptedGroup(endless)])

    async def call() -> str:
        with pytest.raises(AbortedError):
            await collect(answering, request())
        await asyncio.sleep(0.01)
        return "went on"

    calling = asyncio.create_task(call())
    await until(lambda: len(answering.live) == 1)
    answering.abort(["r"])
    assert await calling == "went on"
    assert not calling.cancelling()


async def test_no_time_left_and_draining_are_told_at_the_door() -> None:
    group = ScriptedGroup()
    answering = Answering([group])
    with pytest.raises(DeadlineExceededError):
        await collect(answering, request(), time_left_s=-1.0)
    await answering.drain(1)
    with pytest.raises(UnavailableError, match="draining"):
        await collect(answering, request())
    assert not group.requests


async def test_limits_are_of_each_client_and_count_sequences() -> None:
    answering = Answering([ScriptedGroup(endless)], max_sequences_per_client=4)
    calls = [
        asyncio.create_task(collect(answering, request(name, n), client=client))
        for name, n, client in (("a", 3, "one"), ("b", 4, "two"), ("c", 9, ""))
    ]
    await until(lambda: len(answering.live) == 3)
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match=r"has 3 sequences .*, and 2 more would exceed 4"):
        await collect(answering, request("d", 2), client="one")
    calls.append(asyncio.create_task(collect(answering, request("e", 1), client="one")))
    await until(lambda: len(answering.live) == 4)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_what_is_not_read_to_its_end_counts_against_its_client_and_not_as_active() -> None:
    answering = Answering([ScriptedGroup()], max_sequences_per_client=2)
    async with aclosing(answering.run(request("slow", 2), client="one")) as updates:
        await anext(updates)
        await until(lambda: len(answering.live) == 0)
        with pytest.raises(OverloadedError):
            await collect(answering, request("more"), client="one")
        assert await collect(answering, request("slow"), client="two"), "its id is free"
    assert await collect(answering, request("more"), client="one")
    assert not answering.live._num_sequences


class ClosableGroup(ScriptedGroup):
    is_closed = False

    async def current_stats(self) -> GroupStats:
        return GroupStats(num_steps=7)

    async def close(self) -> None:
        self.is_closed = True


def engine_of(script: Callable[[Request], Any]) -> tuple[Engine, ClosableGroup, list[str]]:
    group, stopped = ClosableGroup(script), []
    return Engine(group, take_trace=dict, stop=lambda: stopped.append("stopped")), group, stopped


def test_an_engine_whose_group_does_not_answer_stops_it() -> None:
    class Mute(ClosableGroup):
        async def connect(self) -> None:
            raise UnavailableError("it did not answer")

    group, stopped = Mute(), []
    with pytest.raises(UnavailableError, match="did not answer"):
        Engine(group, take_trace=dict, stop=lambda: stopped.append("stopped"))
    assert (group.is_closed, stopped) == (True, ["stopped"])


def test_an_engine_answers_requests_as_they_can_begin() -> None:
    engine, group, stopped = engine_of(echo)
    read: list[str] = []

    def requests() -> Any:
        for i in range(20):
            read.append(str(i))
            yield request(str(i), n=1 + i % 2)

    num_ended = 0
    with closing(engine):
        for request_id, found in engine.run(requests(), max_in_flight=3):
            assert isinstance(found, RequestUpdate)
            assert found.request_id == request_id
            if found.finish_reason is not None:
                num_ended += 1
            assert len(read) - num_ended <= 3 + 2
        assert engine.stats().num_steps == 7
    assert num_ended == 30
    assert stopped == ["stopped"]
    assert len(group.requests) == 30


def test_an_engine_tells_what_ends_one_request_and_goes_on_with_the_others() -> None:
    bug = ZeroDivisionError("a bug")
    engine, _, _ = engine_of(lambda r: [update(r, [1]), bug] if r.request_id == "bad" else echo(r))
    with closing(engine):
        found = list(engine.run([request("good"), request("bad"), request("fine")]))
    assert [(name, f) for name, f in found if isinstance(f, Exception)] == [("bad", bug)]
    ends = {name for name, f in found if isinstance(f, RequestUpdate) and f.finish_reason}
    assert ends == {"good", "fine"}


def test_leaving_an_engines_loop_ends_what_runs() -> None:
    engine, group, _ = engine_of(endless)
    with closing(engine):
        with closing(engine.run([request(str(i)) for i in range(5)])) as updates:
            next(updates)
            assert len(group.live) == 5
        assert not group.live
        group.script = echo
        assert list(engine.run([request("0")]))


def test_none_among_requests_waits_for_an_update() -> None:
    engine, group, _ = engine_of(echo)

    def requests() -> Any:
        yield request("a")
        while not group.ended:
            yield None
        yield request("b")

    with closing(engine):
        found = list(engine.run(requests()))
    assert {name for name, _ in found} == {"a", "b"}
    assert found[0][0] == "a"
    assert found[-1][0] == "b"


class BrokenGroup:
    """An InlineGroup whose third step fails."""

    has_work = True

    def __init__(self) -> None:
        self.num_steps = 0
        self.aborted: list[Any] = []

    def stats(self) -> GroupStats:
        return GroupStats()

    def submit(self, request: Request) -> None:
        pass

    def abort(self, keys: Any) -> None:
        self.aborted += keys

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps == 3:
            raise MemoryError("no room")
        time.sleep(0.001)
        return []


async def test_a_local_group_that_fails_in_a_step_fails_its_requests_and_later_ones() -> None:
    broken = BrokenGroup()
    answering = Answering([LocalGroup(broken)])  # type: ignore[arg-type,list-item]
    with pytest.raises(MemoryError, match="no room"):
        await collect(answering, request())
    assert [key.request_id for key in broken.aborted] == ["r"]
    with pytest.raises(UnavailableError, match="no room"):
        await collect(answering, request())
