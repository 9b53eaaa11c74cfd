"""The coordinator's loop with real channels, a scripted coordinator, echo shards and real clients."""

import asyncio
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from actors import coordinator_loop
from actors.coordinator.group_state import Phase
from actors.messages import StepInput, StepOutput
from actors.transport import request_channel
from cluster.answering.group_client import GroupClient
from kernels_integration.errors import (
    LatentrayError,
    OverloadedError,
    UnavailableError,
)
from tests.support import streams
from tests.support.loop_group import LoopGroup, endless, eventually, served
from tests.support.scripted_coordinator import EchoShard, ScriptedCoordinator, request, step_output


async def tokens_of(client: GroupClient, request_id: str, max_tokens: int = 3) -> list[int]:
    return await streams.tokens_of(client, request(request_id, max_tokens))


async def test_requests_stream_to_their_own_client() -> None:
    group = LoopGroup()
    async with served(group) as first:
        second = GroupClient(group.address)
        results = await asyncio.gather(
            *(tokens_of(client, f"{name}-{i}", 1 + i) for name, client in (("a", first), ("b", second))
              for i in range(5))
        )  # fmt: skip
        assert results == [list(range(1 + i)) for _ in range(2) for i in range(5)]
        await second.close()
        assert [s.step for s in group.echoes[1].steps] == [s.step for s in group.echoes[0].steps]


async def test_stats_and_health_travel_with_heartbeats() -> None:
    async with served(LoopGroup()) as client:
        assert (client.healthy, client.message) == (True, "ready")
        await tokens_of(client, "r", 7)
        await eventually(lambda: client.stats is not None and client.stats.num_steps == 7)


async def test_before_the_shards_are_ready_requests_are_refused() -> None:
    group = LoopGroup()
    group.start(ready=False)
    client = GroupClient(group.address)
    try:
        await client.connect()
        assert (client.healthy, client.message) == (False, "0 of 2 shards are ready")
        with pytest.raises(UnavailableError, match="0 of 2 shards"):
            await tokens_of(client, "r")
        for shard in group.shards:
            shard.ready()
        await eventually(lambda: client.healthy)
        assert await tokens_of(client, "r") == [0, 1, 2]
    finally:
        await client.close()
        group.stop()


async def test_errors_of_the_coordinator_reach_the_caller_as_their_class() -> None:
    async with served(LoopGroup(endless(0.01), capacity=1)) as client:
        live = asyncio.create_task(tokens_of(client, "a", 10**6))
        await eventually(lambda: client.stats is not None and client.stats.running == 1)
        with pytest.raises(OverloadedError, match="queue is full"):
            await tokens_of(client, "b")
        assert not live.done()
        live.cancel()


async def test_leaving_a_stream_early_aborts_its_request() -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        stream = streams.stream(client, request("left", 10**6))
        async for _ in stream:
            break
        await stream.aclose()
        await eventually(lambda: group.coordinator.aborted == ["left"])
        task = asyncio.create_task(tokens_of(client, "cancelled", 10**6))
        await eventually(lambda: request("cancelled").key in group.coordinator.live)
        task.cancel()
        await eventually(lambda: group.coordinator.aborted == ["left", "cancelled"])


async def test_closing_a_client_aborts_its_requests_and_no_other() -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        kept = asyncio.create_task(tokens_of(client, "kept", 10**6))
        leaver = GroupClient(group.address)
        left = asyncio.create_task(tokens_of(leaver, "left", 10**6))
        await eventually(lambda: len(group.coordinator.live) == 2)
        await leaver.close()
        with pytest.raises(UnavailableError, match="closed"):
            await left
        await eventually(lambda: group.coordinator.aborted == ["left"])
        kept.cancel()


async def test_a_client_that_falls_silent_has_its_requests_aborted() -> None:
    group = LoopGroup(endless(0.005), client_silence_s=2.0)
    async with served(group) as client:
        crashed: zmq.Socket[bytes] = group.context.socket(zmq.DEALER)
        crashed.connect(group.address)
        crashed.send(request_channel.encode(request_channel.Submit.of(request("orphan", 10**6))))
        kept = asyncio.create_task(tokens_of(client, "kept", 10**6))
        await eventually(lambda: len(group.coordinator.live) == 2)
        await eventually(lambda: group.coordinator.aborted == ["orphan"])
        await asyncio.sleep(0.5)
        assert not kept.done()
        kept.cancel()
        crashed.close(linger=0)


async def test_a_shard_that_dies_fails_live_requests_and_health() -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        live = [asyncio.create_task(tokens_of(client, f"r{i}", 10**6)) for i in range(3)]
        await eventually(lambda: len(group.coordinator.live) == 3)
        group.shards[1]._lifeline.shut()  # as the kernel does when the process ends
        for task in live:
            with pytest.raises(UnavailableError, match=r"shard 1 \(process \d+\) is lost: its connection"):
                await task
        await eventually(lambda: not client.healthy)
        assert "shard 1" in client.message
        with pytest.raises(UnavailableError, match="shard 1"):
            await tokens_of(client, "late")
        assert group.loop.wait_change(9, 1.0).message == client.message
        await eventually(lambda: client.stats is not None and client.stats.running == 0)


async def test_a_silent_shard_is_a_warning_until_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_loop, "SILENCE_WARNING_S", 0.5)
    group = LoopGroup(endless(0.005), silence_s=2.0)
    async with served(group) as client:
        live = asyncio.create_task(tokens_of(client, "r", 10**6))
        await eventually(lambda: len(group.coordinator.live) == 1)
        group.shards[1]._closing.set()  # its heart stops; its connection lives
        await eventually(lambda: "shard 1" in caplog.text and "has not been heard for 0.5 s" in caplog.text)
        assert client.healthy
        assert not live.done()
        with pytest.raises(UnavailableError, match=r"shard 1 .* was not heard for 2 s \(heartbeat timeout\)"):
            await live


async def test_a_frozen_step_is_unhealthy_until_it_reports() -> None:
    may_go_on = threading.Event()

    def freeze(step: StepInput, report: Callable[[StepOutput], None]) -> None:
        if step.step == 2:
            may_go_on.wait(30)
        EchoShard().execute(step, report)

    group = LoopGroup(freeze, stall_s=0.3)
    async with served(group) as client:
        live = asyncio.create_task(tokens_of(client, "r", 3))
        await eventually(lambda: not client.healthy)
        assert "the running step has taken" in client.message
        assert client.stats is not None
        assert client.stats.step_age_s > 0.3
        with pytest.raises(UnavailableError, match=r"step timeout of 0\.3 s"):
            await tokens_of(client, "new")
        may_go_on.set()
        assert await live == [0, 1, 2]
        await eventually(lambda: client.healthy)
        await eventually(lambda: client.stats is not None and client.stats.step_age_s == 0)


SYMPTOMS: dict[str, Callable[[LoopGroup], None]] = {
    "peer": lambda group: group.shards[0].fail("collective_failed", "rank 1 has died"),
    "connection": lambda group: group.shards[1]._lifeline.shut(),
    "process": lambda group: group.loop.shard_lost(1, "it was killed by SIGKILL"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(SYMPTOMS)), ids="-".join)
async def test_the_cause_is_told_and_not_the_first_symptom(order: tuple[str, ...]) -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        for name in order:
            SYMPTOMS[name](group)
            await asyncio.sleep(0.02)
        with pytest.raises(UnavailableError):
            await tokens_of(client, "r", 10**6)
        told = re.compile(r"shard 1 \(process \d+\) is lost: it was killed by SIGKILL")
        await eventually(lambda: told.fullmatch(client.message) is not None)


async def test_a_better_account_corrects_the_failure() -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        SYMPTOMS["connection"](group)
        state = await asyncio.to_thread(group.loop.wait_change, 9, 5.0)
        assert "its connection was closed" in state.message
        SYMPTOMS["process"](group)
        await eventually(lambda: "killed by SIGKILL" in client.message)


async def test_streams_go_on_with_new_shards() -> None:
    """A test in the place of the supervisor: it starts the shards of the next epoch."""
    group = LoopGroup(endless(0.005), max_restarts=1)
    async with served(group) as client:
        received: list[int] = []

        async def collect() -> None:
            async for update in streams.stream(client, request("r", 60)):
                received.extend(update.token_ids)

        live = asyncio.create_task(collect())
        await eventually(lambda: len(received) > 3)
        group.shards[1]._lifeline.shut()
        await eventually(lambda: not client.healthy and "recovering, 0 of 2 shards" in client.message)
        assert group.coordinator.epoch == 1
        assert client.is_recovering
        state = group.loop.wait_change(0, 1.0)
        assert (state.phase, state.epoch, state.lost_rank) == (Phase.RECOVERING, 1, 1)
        group.loop.shard_lost(1, "it was killed by SIGSEGV", 0)
        await eventually(lambda: "killed by SIGSEGV" in client.message)
        for rank in range(2):
            shard = group.shard(rank, epoch=1)
            group.shards.append(shard)
            execute = endless(0.001) if rank == 0 else EchoShard().execute
            thread = threading.Thread(target=group._run_shard, args=(shard, execute))
            group.threads.append(thread)
            thread.start()
            shard.ready()
        await live
        assert received == list(range(60))
        assert client.healthy
        group.shards[-1]._lifeline.shut()
        await eventually(lambda: not client.healthy and "is lost" in client.message)
        assert group.loop.wait_change(9, 1.0).phase is Phase.FAILED


async def test_a_shard_that_reports_its_failure_is_named_with_the_cause() -> None:
    holder: list[LoopGroup] = []

    def fail_third(step: StepInput, report: Callable[[StepOutput], None]) -> None:
        if step.step == 3:
            holder[0].shards[0].fail("collective_failed", "rank 1 left")
        else:
            EchoShard().execute(step, report)

    group = LoopGroup(fail_third)
    holder.append(group)
    async with served(group) as client:
        with pytest.raises(UnavailableError, match=r"shard 0 .*failed: rank 1 left \[collective_failed\]"):
            await tokens_of(client, "r", 10)


async def test_the_supervisor_can_report_a_dead_shard() -> None:
    group = LoopGroup(endless(0.005))
    async with served(group) as client:
        live = asyncio.create_task(tokens_of(client, "r", 10**6))
        await eventually(lambda: bool(group.coordinator.live))
        group.loop.shard_lost(1, "its process was killed")
        with pytest.raises(UnavailableError, match=r"shard 1 .*is lost: its process was killed"):
            await live


async def test_a_long_step_is_slow_and_not_dead() -> None:
    async with served(LoopGroup(endless(0.6), silence_s=0.4)) as client:
        assert await tokens_of(client, "r", 2) == [0, 1]
        assert client.healthy


async def test_a_fault_of_the_coordinator_fails_requests_as_internal() -> None:
    group = LoopGroup()

    def break_down(output: StepOutput) -> None:
        raise ZeroDivisionError("a bug")

    group.coordinator.process = break_down  # type: ignore[method-assign]
    async with served(group) as client:
        with pytest.raises(LatentrayError, match="ZeroDivisionError: a bug") as caught:
            await tokens_of(client, "r")
        assert caught.value.code == "internal"
        await eventually(lambda: not client.healthy)


async def test_reports_that_answer_nothing_are_dropped_and_counted() -> None:
    def repeat(step: StepInput, report: Callable[[StepOutput], None]) -> None:
        for number in (step.step + 7, step.step, step.step):
            report(step_output(number, step.epoch, len(step.slot)))

    group = LoopGroup(repeat)
    async with served(group) as client:
        assert await tokens_of(client, "r", 5) == [0, 1, 2, 3, 4]
        await eventually(lambda: client.stats is not None and client.stats.num_dropped_messages == 10)
        assert client.healthy


async def test_stopping_ends_live_requests_and_lets_the_shards_go() -> None:
    group = LoopGroup(endless(0.005))
    group.start()
    client = GroupClient(group.address)
    await client.connect()
    await eventually(lambda: client.healthy)
    live = asyncio.create_task(tokens_of(client, "r", 10**6))
    await eventually(lambda: bool(group.coordinator.live))
    group.loop.stop()
    with pytest.raises(UnavailableError, match="stopping"):
        await live
    await client.close()
    group.stop()


async def test_a_lost_coordinator_fails_live_requests() -> None:
    context: zmq.Context[Any] = zmq.Context()
    end = request_channel.CoordinatorEnd(context=context)
    client = GroupClient(end.address, silence_s=0.3, give_up_s=0.3)
    connecting = asyncio.create_task(client.connect())
    while not end.receive():
        await asyncio.sleep(0.01)
    end.beat(request_channel.GroupBeat(healthy=True, message="ready", stats=ScriptedCoordinator().stats()))
    await connecting
    live = asyncio.create_task(tokens_of(client, "r"))
    with pytest.raises(UnavailableError, match="no heartbeat"):
        await live
    assert not client.healthy
    await client.close()
    end.close()
    context.term()


async def test_a_coordinator_whose_connection_ends_is_lost_at_once() -> None:
    context: zmq.Context[Any] = zmq.Context()
    end = request_channel.CoordinatorEnd(context=context)
    client = GroupClient(end.address)  # its silence would be noticed after a minute
    connecting = asyncio.create_task(client.connect())
    while not end.receive():
        await asyncio.sleep(0.01)
    end.beat(request_channel.GroupBeat(healthy=True, message="ready", stats=ScriptedCoordinator().stats()))
    await connecting
    live = asyncio.create_task(tokens_of(client, "r"))
    await asyncio.sleep(0.1)
    end.close()
    with pytest.raises(UnavailableError, match=r"connection to the coordinator at .* was closed"):
        await live
    assert not client.healthy
    await client.close()
    context.term()


async def test_a_quiet_coordinator_is_not_healthy_and_ends_nothing() -> None:
    context: zmq.Context[Any] = zmq.Context()
    end = request_channel.CoordinatorEnd(context=context)
    client = GroupClient(end.address, silence_s=0.5)
    connecting = asyncio.create_task(client.connect())
    while not end.receive():
        await asyncio.sleep(0.01)
    beat = request_channel.GroupBeat(healthy=True, message="ready", stats=ScriptedCoordinator().stats())
    end.beat(beat)
    await connecting
    live = asyncio.create_task(tokens_of(client, "r"))
    await eventually(lambda: not client.healthy)
    assert "no heartbeat from the coordinator" in client.message
    assert not live.done()
    end.beat(beat)
    await eventually(lambda: client.healthy)
    live.cancel()
    await client.close()
    end.close()
    context.term()


async def test_an_address_without_a_coordinator_is_unavailable() -> None:
    client = GroupClient("tcp://127.0.0.1:9")
    with pytest.raises(UnavailableError, match=r"tcp://127.0.0.1:9 did not answer within 0.2 s"):
        await client.connect(timeout_s=0.2)
    await client.close()


async def test_the_idle_loop_sleeps() -> None:
    async with served(LoopGroup()):
        before_s = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before_s < 0.25


async def test_requests_wait_for_the_next_shards_until_these_are_given_up() -> None:
    group = LoopGroup(endless(0.005), max_restarts=1)
    async with served(group) as client:
        live = [asyncio.create_task(tokens_of(client, "before", 10**6))]
        await eventually(lambda: bool(group.coordinator.live))
        group.shards[1]._lifeline.shut()
        await eventually(lambda: client.is_recovering and "recovering, 0 of 2" in client.message)
        group.loop.recovery_waits("waiting for room: node 10.0.0.1 has 0 of 2 CPUs free")
        await eventually(lambda: "node 10.0.0.1 has 0 of 2 CPUs free" in client.message)
        assert not live[0].done()
        group.loop.give_up("no room within 300 s")
        with pytest.raises(UnavailableError, match="no room within 300 s"):
            await live[0]
        await eventually(lambda: not client.is_recovering and client.message == "no room within 300 s")


async def test_an_epoch_that_could_not_begin_is_a_loss_without_a_rank() -> None:
    group = LoopGroup(endless(0.005), max_restarts=2)
    async with served(group) as client:
        group.shards[1]._lifeline.shut()
        await eventually(lambda: client.is_recovering and "recovering, 0 of 2" in client.message)
        group.loop.shard_lost(-1, "the shards could not be started again: no memory", 1)
        state = await asyncio.to_thread(group.loop.wait_change, 1, 5.0)
        assert (state.epoch, state.lost_rank, state.num_in_vain) == (2, None, 2)
        assert state.cause == "the shards could not be started again: no memory"
