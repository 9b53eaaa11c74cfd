"""Who may join the queues: the rule by itself, shared by several gateways, and at the one door."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.requests import Request
from actors.sampling_params import SamplingParams
from actors.stats import MAX_QUEUE_PARTS, GroupStats, PhaseTimes, QueuePart, queue_parts
from cluster.answering.admission import Asked, Limits, Pace, QueueSnapshot, refusal
from cluster.answering.answering import Answering
from cluster.answering.group_queue import GroupQueue, PaceMeter
from kernels_integration.errors import OverloadedError
from tests.support.scripted_group import ScriptedGroup, echo, until, update

PARTS = st.lists(
    st.builds(
        QueuePart,
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-2, 2),
        num_requests=st.integers(1, 20),
        num_tokens=st.integers(1, 500),
    ),
    max_size=4,
).map(tuple)
QUEUES = st.lists(
    st.builds(
        QueueSnapshot,
        num_slots=st.integers(1, 16),
        num_running=st.integers(0, 16),
        queued=PARTS,
        sent=PARTS,
        num_front_ends=st.integers(1, 4),
        pace=st.none() | st.builds(Pace, service_s=st.floats(0.01, 30), num_tokens=st.floats(1, 1000)),
    ),
    min_size=1,
    max_size=4,
)
ASKED = st.builds(
    Asked,
    num_requests=st.integers(1, 8),
    num_tokens=st.integers(1, 300),
    max_tokens=st.integers(1, 1000),
    tenant=st.sampled_from(["", "a", "b"]),
    priority=st.integers(-2, 2),
    time_left_s=st.none() | st.floats(0.01, 100),
)
LIMITS = st.builds(
    Limits,
    max_queued_requests=st.integers(0, 60),
    max_queued_tokens=st.integers(0, 2000),
    max_tenant_share=st.floats(0.05, 1),
    by_priority=st.booleans(),
)


def part(num: int = 1, *, tenant: str = "", priority: int = 0, num_tokens: int = 10) -> QueuePart:
    return QueuePart(tenant=tenant, priority=priority, num_requests=num, num_tokens=num_tokens)


def asked(num: int = 1, **fields: Any) -> Asked:
    return Asked(**{"num_requests": num, "num_tokens": 10 * num, "max_tokens": 10} | fields)


@given(ASKED, QUEUES, LIMITS)
def test_less_in_the_queues_never_refuses_what_more_admits(
    wanted: Asked, queues: list[QueueSnapshot], limits: Limits
) -> None:
    """And neither does more time, or no limit; a refusal says when to come again."""
    refused = refusal(wanted, queues, limits)
    if refused is not None:
        assert 1 <= refused.retry_after_s <= 60
        assert refused.reason
        return
    shorter = [
        QueueSnapshot(
            num_slots=queue.num_slots,
            num_running=queue.num_running,
            queued=queue.queued,
            sent=queue.sent[1:],
            num_front_ends=queue.num_front_ends,
            pace=queue.pace,
        )
        for queue in queues
    ]
    assert refusal(wanted, shorter, limits) is None
    patient = Asked(
        num_requests=wanted.num_requests,
        num_tokens=wanted.num_tokens,
        max_tokens=wanted.max_tokens,
        tenant=wanted.tenant,
        priority=wanted.priority,
    )
    assert refusal(patient, queues, limits) is None
    assert refusal(patient, queues, Limits()) is None


@given(ASKED, QUEUES, LIMITS)
def test_what_is_admitted_fits_the_budgets_or_finds_nothing_before_it(
    wanted: Asked, queues: list[QueueSnapshot], limits: Limits
) -> None:
    if limits.by_priority or refusal(wanted, queues, limits) is not None:
        return
    waiting = [each for queue in queues for each in (*queue.queued, *queue.sent)]
    free = sum(queue.num_free for queue in queues)
    num = sum(each.num_requests for each in waiting) + wanted.num_requests
    if not waiting or num <= free:
        return
    if limits.max_queued_requests:
        assert num - free <= limits.max_queued_requests
    if limits.max_queued_tokens:
        assert sum(each.num_tokens for each in waiting) + wanted.num_tokens <= limits.max_queued_tokens


@pytest.mark.parametrize("num_gateways", [1, 3, 10])
def test_gateways_that_know_nothing_of_each_other_exceed_a_budget_by_one_request_each(
    num_gateways: int,
) -> None:
    """One heartbeat for all, then each admits what it can before the next."""
    limits, queued = Limits(max_queued_requests=100), 0
    for _ in range(5):
        before = (part(queued),) if queued else ()
        for _ in range(num_gateways):
            num_sent = 0
            while True:
                sent = (part(num_sent),) if num_sent else ()
                queue = QueueSnapshot(num_slots=0, queued=before, sent=sent, num_front_ends=num_gateways)
                if refusal(asked(), [queue], limits) is not None:
                    break
                num_sent += 1
                assert num_sent <= 100
            queued += num_sent
    assert 100 - num_gateways <= queued <= 100 + num_gateways


def test_a_free_slot_is_no_queue_and_one_request_larger_than_the_budget_is_taken_alone() -> None:
    limits = Limits(max_queued_requests=4, max_queued_tokens=50)
    free = QueueSnapshot(num_slots=8, num_running=2)
    assert refusal(asked(6, num_tokens=999), [free], limits) is None
    full = QueueSnapshot(num_slots=8, num_running=8)
    assert refusal(asked(9, num_tokens=999), [full], limits) is None
    waiting = QueueSnapshot(num_slots=8, num_running=8, queued=(part(1),))
    assert refusal(asked(3), [waiting], limits) is None
    assert refusal(asked(4), [waiting], limits) is not None
    refused = refusal(asked(1, num_tokens=41), [waiting], limits)
    assert refused is not None
    assert "max-queued-tokens" in refused.reason


def test_a_tenant_gets_its_share_and_no_more() -> None:
    limits = Limits(max_queued_requests=10, max_tenant_share=0.5)
    queue = QueueSnapshot(num_slots=2, num_running=2, queued=(part(5, tenant="a"),))
    refused = refusal(asked(tenant="a"), [queue], limits)
    assert refused is not None
    assert "tenant 'a'" in refused.reason
    assert refusal(asked(tenant="b"), [queue], limits) is None
    assert refusal(asked(), [queue], limits) is None


def test_who_is_served_first_waits_only_for_those_before_it() -> None:
    queue = QueueSnapshot(num_slots=2, num_running=2, queued=(part(10, priority=5),))
    by_priority = Limits(max_queued_requests=10, by_priority=True)
    assert refusal(asked(priority=5), [queue], by_priority) is not None
    assert refusal(asked(priority=0), [queue], by_priority) is None
    assert refusal(asked(priority=0), [queue], Limits(max_queued_requests=10)) is not None
    # but not without end
    twice = QueueSnapshot(num_slots=2, num_running=2, queued=(part(20, priority=5),))
    assert refusal(asked(priority=0), [twice], by_priority) is not None


def test_a_deadline_that_the_queue_would_break_is_refused_at_once() -> None:
    """8 slots, 2 s a request: 4 leave a second. 12 wait: its turn is after 3.25 s, its end after 5.25 s, or a
    quarter more."""
    pace = Pace(service_s=2.0, num_tokens=100)
    queue = QueueSnapshot(num_slots=8, num_running=8, queued=(part(12),), pace=pace)
    refused = refusal(asked(max_tokens=100, time_left_s=6.5), [queue], Limits())
    assert refused is not None
    assert "3.25 s" in refused.reason
    assert refusal(asked(max_tokens=100, time_left_s=6.6), [queue], Limits()) is None
    # a short one ends sooner, and an idle group has no queue
    assert refusal(asked(max_tokens=10, time_left_s=4.4), [queue], Limits()) is None
    idle = QueueSnapshot(num_slots=8, num_running=7, pace=pace)
    assert refusal(asked(time_left_s=0.1), [queue, idle], Limits()) is None


def test_parts_of_a_queue_are_bounded_and_lose_nobody() -> None:
    waiting = [(f"t{number}", number % 3, number) for number in range(1000)] + [("big", 7, 1)] * 5
    parts = queue_parts(waiting)
    assert len(parts) == MAX_QUEUE_PARTS
    assert parts[0] == QueuePart(tenant="big", priority=7, num_requests=5, num_tokens=5)
    assert sum(each.num_requests for each in parts) == len(waiting)
    assert sum(each.num_tokens for each in parts) == sum(entry[2] for entry in waiting)
    assert parts[-1].tenant == ""


def test_a_pace_follows_the_newest_and_survives_a_restart() -> None:
    meter = PaceMeter()

    def finished(num: int, seconds: float, tokens: int) -> GroupStats:
        phases = PhaseTimes(num_finished=num, queue_s=1e6, prefill_s=seconds / 2, decode_s=seconds / 2)
        return GroupStats(phases=phases, num_generated_tokens=tokens)

    meter.observe(GroupStats())
    assert meter.pace is None
    meter.observe(finished(10, 20.0, 500))
    assert meter.pace == Pace(service_s=2.0, num_tokens=50.0)
    meter.observe(finished(1000, 20.0 + 990 * 4, 500 + 990 * 10))
    newest = meter.pace
    assert newest is not None
    assert 3.9 < newest.service_s < 4
    meter.observe(finished(0, 0, 0))  # a coordinator that was started anew
    assert meter.pace == newest
    meter.observe(finished(8, 8.0, 80))
    assert meter.pace is not None
    assert newest.service_s > meter.pace.service_s > 1


def request(request_id: str = "r", **fields: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(10, 11),
        params=SamplingParams(max_tokens=8),
        seed=1,
        eos_token_ids=(),
        **fields,
    )


def test_what_was_sent_counts_until_a_heartbeat_tells_of_it() -> None:
    now = [100.0]
    queue = GroupQueue(clock=lambda: now[0])
    first = GroupStats(num_slots=1)
    queue.sent(request("a"))
    queue.sent(request("b"))
    assert len(queue.snapshot(first).sent) == 2
    queue.left(request("a").key)
    assert len(queue.snapshot(first).sent) == 1
    now[0] += 1
    queue.sent(request("c"))  # just before the heartbeat that may not tell of it
    told = replace(first, queue=(part(),))
    snapshot = queue.snapshot(told)
    assert (len(snapshot.sent), snapshot.queued) == (1, (part(),))
    now[0] += 1
    assert len(queue.snapshot(told).sent) == 1
    assert not queue.snapshot(replace(told)).sent


async def run(answering: Answering, asked: Request, **options: Any) -> int:
    async with answering.admit(asked.request_id, **options) as live:
        return len([found async for found in answering.answer(live, asked)])


async def test_the_door_refuses_what_the_queues_cannot_take_before_anything_is_submitted() -> None:
    group = ScriptedGroup(echo)
    pace = PhaseTimes(num_finished=10, prefill_s=0.0, decode_s=20.0)
    group.stats = GroupStats(
        num_slots=2, running=2, phases=pace, num_generated_tokens=80, queue=(part(5, tenant="a"),)
    )
    answering = Answering([group], limits=Limits(max_queued_requests=10, max_tenant_share=0.5))
    with pytest.raises(OverloadedError, match="tenant 'a'") as caught:
        await run(answering, request(), tenant="a")
    assert caught.value.retry_after_s == 1.0  # one of two that take 2 s
    with pytest.raises(OverloadedError, match="deadline"):
        await run(answering, request(), time_left_s=3.0)
    assert not group.requests
    assert len(answering.live) == 0
    assert await run(answering, request(), tenant="b", time_left_s=60.0) == 3
    assert [asked.tenant for asked in group.requests] == ["b"]


async def test_of_what_comes_at_once_the_queues_take_what_they_have_room_for() -> None:
    """Between two heartbeats a front end counts what it sends itself."""
    never = asyncio.Event()
    group = ScriptedGroup(lambda asked: [never, *echo(asked)])
    group.stats = GroupStats(num_slots=4)
    answering = Answering([group], limits=Limits(max_queued_requests=6))
    calls = [asyncio.create_task(run(answering, request(f"r{number}"))) for number in range(20)]
    await until(lambda: sum(call.done() for call in calls) == 10)
    assert len(group.live) == 10
    never.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, OverloadedError) for outcome in found] == [False] * 10 + [True] * 10
    group.script = lambda asked: [update(asked, [1], finish_reason="length")]
    assert await run(answering, request()) == 1
