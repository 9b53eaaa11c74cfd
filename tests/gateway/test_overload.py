"""More than the groups can serve: refused at once and in words of when to return, over both doors."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.stats import GroupStats, PhaseTimes, QueuePart
from cluster.answering.admission import Limits
from tests.gateway.conftest import Serve
from tests.gateway.test_http import post
from tests.support.queueing_group import QueueingGroup
from tests.support.scripted_group import ScriptedGroup, echo, until

pytestmark = [pytest.mark.gateway, pytest.mark.alone]


def generate(request_id: str, *, stream: bool = True) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id, stream=stream, tokenized=pb.TokenizedInput(input_ids=[5, 6, 7])
    )
    request.sampling_params.max_tokens = 2
    return request


def retry_s(error: grpc.aio.AioRpcError) -> float:
    """Of the RetryInfo that the status must have."""
    [data] = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    info = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(data).details)
    return info.retry_delay.ToTimedelta().total_seconds()


async def test_both_doors_say_when_to_come_again(serve: Serve, stub_of: Any) -> None:
    """Four running, 2 s each, twelve waiting where ten may: the thirteenth's room comes in 2 s."""
    group = ScriptedGroup(echo)
    pace = PhaseTimes(num_finished=100, decode_s=200.0)
    waiting = QueuePart(tenant="a", num_requests=12, num_tokens=36)
    group.stats = GroupStats(num_slots=4, running=4, phases=pace, num_generated_tokens=200, queue=(waiting,))
    server = await serve(group, http_port=0, limits=Limits(max_queued_requests=10))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub_of(server).Generate(generate("r"))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-queued-requests" in str(caught.value.details())
    assert retry_s(caught.value) == 1.5
    status, answer, headers = await post(server, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "rate_limit_exceeded", "2")
    assert not group.requests


async def test_a_tenants_requests_are_known_by_metadata_and_header(serve: Serve, stub_of: Any) -> None:
    group = ScriptedGroup(echo)
    waiting = QueuePart(tenant="a", num_requests=5, num_tokens=15)
    group.stats = GroupStats(num_slots=1, running=1, queue=(waiting,))
    server = await serve(group, http_port=0, limits=Limits(max_queued_requests=10, max_tenant_share=0.5))
    stub = stub_of(server)
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(generate("r"), metadata=(("x-tenant", "a"),))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await post(server, "/v1/completions", body, **{"X-Tenant": "a"}))[0] == 429
    assert await anext(aiter(stub.Generate(generate("r"), metadata=(("x-tenant", "b"),))))
    assert (await post(server, "/v1/completions", body, **{"X-Tenant": "c"}))[0] == 200
    assert [asked.tenant for asked in group.requests] == ["b", "c"]
    status, answer, _ = await post(server, "/v1/completions", body, **{"X-Tenant": "é" * 200})
    assert (status, answer["error"]["param"]) == (400, "x-tenant")


@pytest.mark.alone
async def test_at_ten_times_the_capacity_some_are_refused_at_once_and_the_others_are_in_time(
    serve: Serve, stub_of: Any
) -> None:
    """80 requests a second can be served, 800 come, and each has 3 s."""
    group = QueueingGroup(num_slots=8, service_s=0.1)
    server = await serve(group, limits=Limits(max_queued_requests=1000))
    stub = stub_of(server)

    async def ask(number: int) -> tuple[str, float, int]:
        """Its status, how long that took, tokens until then."""
        start_s, num_tokens = time.monotonic(), 0
        try:
            async for response in stub.Generate(generate(f"r{number}"), timeout=3.0):
                num_tokens += len(response.chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            return error.code().name, time.monotonic() - start_s, num_tokens
        return "OK", time.monotonic() - start_s, num_tokens

    await asyncio.gather(*(ask(number) for number in range(16)))  # so that the pace is known
    calls = []
    for number in range(100, 900):
        calls.append(asyncio.create_task(ask(number)))
        if number % 8 == 0:
            await asyncio.sleep(0.01)
    found = await asyncio.gather(*calls)
    by_status = {status: [entry for entry in found if entry[0] == status] for status, _, _ in found}
    assert by_status.keys() <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    answered, refused = len(by_status["OK"]), len(by_status["RESOURCE_EXHAUSTED"])
    assert answered >= 40
    assert refused >= 80
    # Taken in one after the other, two of three would be late; a busy machine makes some of the admitted so.
    assert len(by_status.get("DEADLINE_EXCEEDED", ())) <= 0.25 * answered
    assert all(num_tokens == 0 for _, _, num_tokens in by_status["RESOURCE_EXHAUSTED"])
    assert group.max_running == 8
    await until(lambda: group.num_live == 0)
