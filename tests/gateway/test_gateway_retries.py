"""Ids, retries and limits, over the real channel and a coordinator that answers by script."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from cluster.answering.answering import Answering
from cluster.answering.group_client import GroupClient
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import GatewayServer, server
from tests.gateway.conftest import CHECKPOINT, Serve
from tests.support.loop_group import LoopGroup, endless, eventually
from tests.support.scripted_coordinator import request as scripted_request
from tests.support.scripted_group import ScriptedGroup, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
ENDLESS = 90_000
"""Tokens: minutes. What runs on with no reader is still there when a test looks."""


@pytest.fixture(scope="module")
def long_frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(CHECKPOINT, served_model_name="tiny", max_model_len=100_000, seed=0)


@pytest.fixture
async def group() -> AsyncIterator[LoopGroup]:
    group = LoopGroup(endless(0.001))
    group.start()
    yield group
    await asyncio.to_thread(group.stop)


@pytest.fixture
async def stub(
    group: LoopGroup, serve: Serve, stub_of: Any, long_frontend: ModelFrontend
) -> AsyncIterator[Any]:
    async with GroupClient(group.address) as client:
        await eventually(lambda: client.healthy)
        gateway = await serve(client, frontend=long_frontend)
        yield stub_of(gateway)
        await gateway.stop(drain_s=0)


def request(request_id: str, max_tokens: int, n: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=[5, 6]),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True),
        stream=True,
    )


async def outcome(call: Any) -> str:
    """ "OK" and the number of tokens, or the status."""
    num_tokens = 0
    try:
        async for response in call:
            num_tokens += len(response.chunk.token_ids)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    except asyncio.CancelledError:
        return "CANCELLED by the client"
    return f"OK {num_tokens}"


async def after_deadline(stub: Any, request_id: str) -> str:
    await outcome(stub.Generate(request(request_id, ENDLESS), timeout=0.03))
    return await outcome(stub.Generate(request(request_id, 4)))


async def after_cancel(stub: Any, request_id: str) -> str:
    call = stub.Generate(request(request_id, ENDLESS))
    await anext(aiter(call))
    call.cancel()
    return await outcome(stub.Generate(request(request_id, 4)))


async def after_abort(stub: Any, request_id: str) -> str:
    call = stub.Generate(request(request_id, ENDLESS))
    responses = aiter(call)
    await anext(responses)
    await stub.Abort(pb.AbortRequest(request_ids=[request_id]))
    found = await outcome(stub.Generate(request(request_id, 4)))
    assert await outcome(responses) == "CANCELLED"
    return found


@pytest.mark.parametrize("ending", [after_deadline, after_cancel, after_abort])
async def test_a_retry_runs_to_its_end_or_is_refused_at_once(
    group: LoopGroup, stub: Any, ending: Any
) -> None:
    """Never ended by what was meant for its predecessor; and nothing runs without a reader."""
    found = Counter([await ending(stub, f"{ending.__name__}-{i}") for i in range(60)])
    assert found.keys() <= {"OK 4", "ALREADY_EXISTS"}
    assert found["OK 4"] > 0
    await eventually(lambda: not group.coordinator.live)


async def test_no_retry_becomes_an_orphan(group: LoopGroup, stub: Any) -> None:
    for i in range(60):
        for num_wanted in (1, 6):
            call = stub.Generate(request(f"r{i}", ENDLESS))
            responses = aiter(call)
            refused = None
            try:
                for _ in range(num_wanted):
                    await anext(responses)
            except grpc.aio.AioRpcError as error:
                refused = error.code()
            assert refused in (None, grpc.StatusCode.ALREADY_EXISTS)
            call.cancel()
    await eventually(lambda: not group.coordinator.live)
    assert await outcome(stub.Generate(request("r0", 4))) == "OK 4"


async def test_choices_have_no_names_in_the_space_of_users(group: LoopGroup, stub: Any) -> None:
    other = stub.Generate(request("0_x", ENDLESS))
    await anext(aiter(other))
    assert await outcome(stub.Generate(request("x", 4, n=2))) == "OK 8"
    both = stub.Generate(request("x", ENDLESS, n=2))
    responses = aiter(both)
    await anext(responses)
    other.cancel()
    await eventually(lambda: len(group.coordinator.live) == 2)
    await stub.Abort(pb.AbortRequest(request_ids=["0_x", "1_x", "generate-x"]))  # nobody has sent these
    for _ in range(10):
        await anext(responses)
    await stub.Abort(pb.AbortRequest(request_ids=["x"]))
    assert await outcome(responses) == "CANCELLED"
    await eventually(lambda: not group.coordinator.live)


async def test_one_id_may_live_at_two_gateways(
    group: LoopGroup, stub: Any, serve: Serve, stub_of: Any, long_frontend: ModelFrontend
) -> None:
    """Abort reaches the requests of the gateway that it is sent to."""
    async with GroupClient(group.address) as client:
        await eventually(lambda: client.healthy)
        gateway = await serve(client, frontend=long_frontend)
        mine, others = stub.Generate(request("x", ENDLESS)), stub_of(gateway).Generate(request("x", ENDLESS))
        responses = aiter(others)
        await anext(aiter(mine))
        await anext(responses)
        await stub.Abort(pb.AbortRequest(request_ids=["x"]))
        await eventually(lambda: len(group.coordinator.live) == 1)
        await anext(responses)
        await gateway.stop(drain_s=0)


async def test_a_group_that_fails_ends_calls_with_unavailable(group: LoopGroup, stub: Any) -> None:
    call = stub.Generate(request("r", ENDLESS))
    responses = aiter(call)
    await anext(responses)
    group.loop.shard_lost(1, "its process was killed")
    assert await outcome(responses) == "UNAVAILABLE"


async def test_one_client_gets_a_bounded_number_of_sequences(
    serve: Serve, stub_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_SEQUENCES_PER_CLIENT", 10)
    group = ScriptedGroup(lambda r: [update(r, [1]), asyncio.Event()])
    gateway: GatewayServer = await serve(group)
    stub = stub_of(gateway)
    calls = [stub.Generate(request(f"r{i}", 9, n=4)) for i in range(2)]
    for call in calls:
        await anext(aiter(call))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(request("more", 9, n=3))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "8 sequences" in caught.value.details()
    assert "10" in caught.value.details()
    assert await anext(aiter(stub.Generate(request("two", 9, n=2))))
    calls[0].cancel()
    await eventually(lambda: len(group.live) == 2)
    assert await anext(aiter(stub.Generate(request("more", 9, n=3))))


async def test_what_the_group_has_answered_is_not_active_however_slowly_it_is_read(
    serve: Serve, stub_of: Any
) -> None:
    """Its messages wait in HTTP/2's window; its id and its place among the active ones are free."""
    ids = list(range(10, 110))
    many = 4000

    def script(asked: Any) -> Any:
        if asked.request_id == "quick":
            return [update(asked, ids[:1], finish_reason="length")]
        steps = [update(asked, ids, 100 * i, num_held=0) for i in range(many)]
        return [*steps, update(asked, [1], 100 * many, finish_reason="length")]

    group = ScriptedGroup(script)
    stub = stub_of(await serve(group))
    call = stub.Generate(request("slow", 9))
    responses = aiter(call)
    first = await anext(responses)
    assert list(first.chunk.token_ids) == ids
    await eventually(lambda: group.ended == {"slow": "finished"})
    assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0
    assert await outcome(stub.Generate(request("quick", 9))) == "OK 1"
    num_tokens = len(ids) + sum([len(response.chunk.token_ids) async for response in responses])
    assert num_tokens == 100 * many + 1, "the slow one still gets everything"


async def test_requests_go_to_the_healthy_group_that_has_fewest(config: GroupConfig) -> None:
    groups = [ScriptedGroup(lambda r: [asyncio.Event()]) for _ in range(3)]
    answering = Answering(groups)
    groups[1].healthy, groups[1].message = False, "shard 0 is lost"
    assert answering.groups.healthy
    assert answering.groups.message == "group 1: shard 0 is lost"
    chosen = []
    for num_sequences in (2, 1, 1, 3):
        group = answering.groups.choose(scripted_request("r"))
        for index in range(num_sequences):
            answering.groups.took(group, replace(scripted_request("r"), index=index))
        chosen.append(groups.index(group))
    assert chosen == [0, 2, 2, 0]


async def test_loads_of_several_groups_are_listed(serve: Serve, stub_of: Any, config: GroupConfig) -> None:
    groups = [ScriptedGroup(), ScriptedGroup()]
    gateway = await serve(groups[0], groups=groups)
    stub = stub_of(gateway)
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert (loads.dp_rank_count, [load.dp_rank for load in loads.loads]) == (2, [0, 1])
    [second] = (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
    assert second.dp_rank == 1
    groups[0].healthy = False
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    groups[1].healthy = False
    assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
