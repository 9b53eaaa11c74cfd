"""Every option of the server by its effect on a client: gRPC ignores a name that it does not know."""

import asyncio
import struct

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from cluster.gateway import options
from cluster.gateway.options import DEFAULT_MAX_MESSAGE_BYTES, MIN_PING_INTERVAL_MS, server_options
from tests.support.scripted_group import ScriptedGroup

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
NUM_PINGS = 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _GOAWAY = 4, 6, 7


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """An HTTP/2 frame of the connection itself."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


async def farewell(port: int, interval_s: float) -> bytes | None:
    """Ping an idle connection NUM_PINGS times; what GOAWAY said, None without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> bytes | None:
        num_acknowledged = 0
        while num_acknowledged < NUM_PINGS:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == _GOAWAY:
                return payload[8:]
            num_acknowledged += head[3] == _PING and head[4] == 1
        return None

    async def ping() -> None:
        writer.write(_PREFACE + frame(_SETTINGS))
        for number in range(NUM_PINGS):
            writer.write(frame(_PING, number.to_bytes(8, "big")))
            await asyncio.sleep(interval_s)

    pinging = asyncio.create_task(ping())
    try:
        return await asyncio.wait_for(read(), 30)
    finally:
        pinging.cancel()
        writer.close()


async def test_an_idle_client_may_ping_as_often_as_told_and_no_more(serve, monkeypatch) -> None:
    monkeypatch.setattr(options, "MIN_PING_INTERVAL_MS", 200)
    server = await serve(ScriptedGroup())
    assert await farewell(server.port, 0.3) is None
    assert await farewell(server.port, 0.02) == b"too_many_pings"


def test_clients_may_ping_as_often_as_with_vllm() -> None:
    assert MIN_PING_INTERVAL_MS == 10_000
    named = dict(server_options(DEFAULT_MAX_MESSAGE_BYTES))
    assert named["grpc.http2.min_ping_interval_without_data_ms"] == MIN_PING_INTERVAL_MS


def tokenized(num_ids: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id="r", stream=True)
    request.tokenized.input_ids.extend([5] * num_ids)
    return request


async def refusal(call: grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details()


async def test_the_limit_of_what_is_received(serve, stub_of) -> None:
    beyond_grpcs_default = tokenized(5 * 2**20)
    stub = stub_of(await serve(ScriptedGroup()))
    code, told = await refusal(stub.Generate(beyond_grpcs_default))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, told
    assert "max_model_len" in told, "it has arrived, and another limit is told"
    stub = stub_of(await serve(ScriptedGroup(), max_message_bytes=1000))
    code, told = await refusal(stub.Generate(tokenized(2000)))
    assert (code, "--max-message-size" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, told = await refusal(stub.Generate(tokenized(5000)))
    assert (code, "max (5011 vs. 4000)" in told) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), told


async def test_the_limit_of_what_is_sent(serve, stub_of) -> None:
    group = ScriptedGroup()
    group.healthy, group.message = False, "x" * 5000
    small = stub_of(await serve(group, max_message_bytes=1000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await small.HealthCheck(pb.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    large = stub_of(await serve(group, max_message_bytes=2000))
    assert len((await large.HealthCheck(pb.HealthCheckRequest())).message) == 5000
