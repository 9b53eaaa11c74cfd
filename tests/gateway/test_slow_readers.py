"""Clients that read slowly or not at all, over both doors: they cost little and delay nobody."""

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.requests import Request, RequestUpdate
from cluster.gateway import servicer
from tests.gateway.conftest import Serve
from tests.gateway.test_overload import generate
from tests.support.scripted_group import ScriptedGroup, echo, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
NUM_UPDATES = 30_000
MAX_BYTES = 4 * 2**20
"""Kept one by one, the updates alone would take three times as much."""


def long_or_short(request: Request) -> Iterator[RequestUpdate]:
    if request.request_id != "slow":
        yield from echo(request)  # type: ignore[misc]
        return
    for number in range(NUM_UPDATES):
        yield update(request, [5 + number % 1000], number)
    yield update(request, [4], NUM_UPDATES, finish_reason="length")


async def memory_while(finished: Callable[[], Awaitable[None]]) -> int:
    """How many bytes Python's objects have come to take meanwhile."""
    gc.collect()
    tracemalloc.start()
    try:
        await finished()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


async def test_a_slow_grpc_reader_costs_little_and_delays_nobody(serve: Serve, stub_of: Any) -> None:
    group = ScriptedGroup(long_or_short)
    server = await serve(group)
    slow, quick = stub_of(server), stub_of(server, **{"grpc.use_local_subchannel_pool": 1})
    call = slow.Generate(generate("slow"))
    responses = aiter(call)
    ids = list((await anext(responses)).chunk.token_ids)

    async def others_are_answered() -> None:
        number = 0
        while group.ended.get("slow") != "finished":
            answer = [response async for response in quick.Generate(generate(f"quick-{number}"))]
            assert answer[-1].HasField("complete")
            number += 1
        assert number > 0

    assert await memory_while(others_are_answered) < MAX_BYTES
    info = await quick.GetServerInfo(pb.GetServerInfoRequest())
    assert info.active_requests == 0, "the group has answered it"
    num_messages = 0
    async for response in responses:
        ids += response.chunk.token_ids
        num_messages += response.HasField("chunk")
    assert ids == [5 + number % 1000 for number in range(NUM_UPDATES)] + [4]
    assert num_messages < NUM_UPDATES / 2, "what waited was merged"


async def test_a_slow_http_reader_costs_little_and_gets_everything(serve: Serve) -> None:
    group = ScriptedGroup(long_or_short)
    server = await serve(group, http_port=0)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.http_port))
    body = json.dumps({"prompt": [5], "max_tokens": 200, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: slow\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(client, head % len(body) + body)
    await until(lambda: bool(group.requests))

    async def is_answered() -> None:
        await until(lambda: group.ended.get("slow") == "finished", timeout_s=60)

    assert await memory_while(is_answered) < MAX_BYTES
    assert len(server._answering.live) == 0
    reader, writer = await asyncio.open_connection(sock=client)
    text = (await asyncio.wait_for(reader.read(), 60)).decode()
    writer.close()
    assert text.rstrip().endswith("0")  # the last of the chunks that HTTP divides it into
    assert "data: [DONE]" in text
    events = [line for line in text.splitlines() if line.startswith("data: {")]
    assert 0 < len(events) < 0.9 * NUM_UPDATES, "what the socket did not take was merged"


async def test_a_grpc_client_that_reads_nothing_is_left(
    serve: Serve, stub_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "WRITE_TIMEOUT_S", 0.3)
    never = asyncio.Event()
    group = ScriptedGroup(
        lambda asked: [*(update(asked, range(2**30, 2**30 + 100), 100 * i) for i in range(9000)), never]
    )
    server = await serve(group)
    call = stub_of(server, **{"grpc.http2.bdp_probe": 0}).Generate(generate("r"))
    await anext(aiter(call))
    await until(lambda: not group.live, timeout_s=60)
    assert group.ended == {"r": "aborted"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
