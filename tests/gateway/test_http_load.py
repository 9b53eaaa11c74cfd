"""Many, slow and hostile clients: they are refused or served, nothing of them stays, and gRPC goes on."""

import asyncio
import gzip
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from actors.requests import Request
from benchmarks import http_load
from cluster.answering import answering
from cluster.answering.choices import choices
from cluster.gateway import GatewayServer
from cluster.http import completions, request_body
from cluster.http import server as http_server
from tests.gateway.test_http import post
from tests.support.scripted_group import Script, ScriptedGroup, echo, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
Serve = Callable[..., Awaitable[GatewayServer]]
ASK = {"prompt": [5, 6, 7], "max_tokens": 9}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def is_served(server: GatewayServer) -> bool:
    status, _, _ = await post(server, "/v1/completions", ASK)
    return status == 200


async def connect(server: GatewayServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.http_port)


async def test_500_streams_beside_grpc(serve: Serve, stub_of: Callable[[GatewayServer], Any]) -> None:
    group = ScriptedGroup(echo)
    server = await serve(group, http_port=0)
    stub = stub_of(server)
    body = json.dumps(ASK | {"stream": True}).encode()

    async def grpc() -> list[int]:
        request = vllm_engine_pb2.GenerateRequest(
            request_id="grpc", stream=True, tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7])
        )
        request.sampling_params.max_tokens = 60
        ids: list[int] = []
        async for response in stub.Generate(request):
            ids += response.chunk.token_ids
        return ids

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> str:
            url = f"http://127.0.0.1:{server.http_port}/v1/completions"
            headers = {"Content-Type": "application/json"}
            async with session.post(url, data=body, headers=headers) as answer:
                return await answer.text()

        beside = asyncio.create_task(grpc())
        texts = await asyncio.gather(*(stream() for _ in range(500)))
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert len(await beside) == 60
    assert not group.live


@pytest.mark.parametrize("name", http_load.ATTACKS)
async def test_a_grpc_client_has_its_answers_beside_each_attack(serve: Serve, name: str) -> None:
    """With few clients; with many `python -m benchmarks.http_load` measures it."""
    attack, _ = http_load.ATTACKS[name]
    group = ScriptedGroup(echo)
    server = await serve(group, http_port=0)
    assert server.http_port is not None
    beside = http_load.Beside()
    client = asyncio.create_task(beside.run(server.address))
    answers = await attack(server.http_port, 8, 0.3)
    beside.done.set()
    await client
    assert (beside.failures, beside.answers > 0) == (0, True)
    assert sum(answers.values()) == 8
    assert not any(status.startswith("5") for status in answers)
    await until(lambda: not group.live)
    assert server._http_server is not None
    bodies = server._http_server._bodies
    await until(lambda: bodies._num_held == 0)
    assert await is_served(server)


async def test_a_storm_of_clients_that_leave(serve: Serve) -> None:
    never = asyncio.Event()

    def script(request: Request) -> Script:
        return [update(request, [5]), never]

    group = ScriptedGroup(script)
    server = await serve(group, http_port=0)
    body = json.dumps(ASK | {"stream": True}).encode()
    writers = []
    for _ in range(100):
        _, writer = await connect(server)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writers.append(writer)
    await until(lambda: len(group.live) == 100)
    for writer in writers:
        writer.transport.abort()
    await until(lambda: not group.live)
    group.script = echo
    assert await is_served(server)


async def test_a_reader_that_reads_nothing_is_left(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "WRITE_TIMEOUT_S", 0.3)

    def script(request: Request) -> Script:
        return [update(request, [5] * 50, 50 * i) for i in range(4000)]

    group = ScriptedGroup(script)
    server = await serve(group, http_port=0)
    client = socket.create_connection(("127.0.0.1", server.http_port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"prompt": [5], "max_tokens": 255, "stream": True, "logprobs": 5}).encode()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: bool(group.requests))
    await until(lambda: not group.live, timeout_s=100)
    assert set(group.ended.values()) == {"aborted"}
    client.close()
    group.script = echo
    assert await is_served(server)


async def test_heads_and_bodies_that_never_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    monkeypatch.setattr(request_body, "READ_TIMEOUT_S", 0.5)
    server = await serve(ScriptedGroup(echo), http_port=0)
    silent, _ = await connect(server)
    reader, writer = await connect(server)
    writer.write(HEAD[:40])
    with_body, body_writer = await connect(server)
    body_writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
    assert await is_served(server)

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert await asyncio.wait_for(silent.read(), 10) == b""
    assert await asyncio.wait_for(reader.read(), 10) == b""
    dripping.cancel()
    answer = await asyncio.wait_for(with_body.readuntil(b"}}"), 10)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"has not come within" in answer


async def test_floods_of_headers_are_refused(serve: Serve) -> None:
    server = await serve(ScriptedGroup(echo), http_port=0)
    floods = [
        HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        HEAD + b"X-Long: " + b"y" * 2**20 + b"\r\n\r\n",
        b"GET /" + b"y" * 2**17 + b" HTTP/1.1\r\n\r\n",
        b"\x00\x01\x02 no HTTP at all\r\n\r\n",
    ]
    for flood in floods:
        reader, writer = await connect(server)
        writer.write(flood)
        try:
            answer = await asyncio.wait_for(reader.read(), 10)
        except ConnectionResetError:
            answer = b"HTTP/1.1 400"  # it was refused before all of it was sent
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:100]
        if body := answer.partition(b"\r\n\r\n")[2]:
            told = json.loads(body)["error"]
            assert (told["type"], told["param"]) == ("invalid_request_error", None)
            assert "the request is not HTTP as it is spoken here" in told["message"]
        writer.close()
    assert await is_served(server)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: the best\r\n\r\n", 417),
        (b"POST /v1/none HTTP/1.1\r\nHost: x\r\nExpect: the best\r\n\r\n", 417),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    ],
)
async def test_what_servers_refuse_by_themselves_has_the_envelope(
    serve: Serve, head: bytes, status: int
) -> None:
    server = await serve(ScriptedGroup(echo), http_port=0)
    reader, writer = await connect(server)
    writer.write(head)
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    assert int(answer[9:12]) == status
    told = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert list(told) == ["message", "type", "param", "code"]
    assert told["type"] == "invalid_request_error"
    writer.close()


async def test_bodies_of_the_largest_size(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is answered; what is too large, or too much together, is refused while it comes."""
    size = 2**20
    server = await serve(ScriptedGroup(echo), http_port=0, max_message_bytes=size)
    room = size - len(json.dumps({"prompt": ""}))
    status, answer, _ = await post(server, "/v1/completions", {"prompt": "x" * room})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer, _ = await post(server, "/v1/completions", {"prompt": "x" * (room + 1)})
    assert (status, f"more than {size} bytes" in answer["error"]["message"]) == (413, True)

    async def chunked() -> Any:
        for _ in range(64):
            yield b"x" * 2**15

    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{server.http_port}/v1/completions",
            data=chunked(),
            headers={"Content-Type": "application/json"},
        ) as found,
    ):
        assert found.status == 413

    bodies = server._http_server._bodies  # type: ignore[union-attr]
    monkeypatch.setattr(bodies, "_max_held", size)
    held = []
    for _ in range(3):
        reader, writer = await connect(server)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * (size // 2 - 1000))
        held.append((reader, writer))
    first = [asyncio.create_task(reader.readuntil(b"}}")) for reader, _ in held]
    done, waiting = await asyncio.wait(first, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert all(task.result().startswith(b"HTTP/1.1 429") for task in done)
    for task in waiting:
        task.cancel()
    for _, writer in held:
        writer.transport.abort()
    await until(lambda: bodies._num_held == 0)
    assert await is_served(server)


async def test_a_small_body_that_would_grow_is_refused_unread(serve: Serve) -> None:
    """A body that is packed takes the loop's time, however little of it may come."""
    server = await serve(ScriptedGroup(echo), http_port=0)
    body = gzip.compress(json.dumps({"prompt": "a" * 2**10, "max_tokens": 1}).encode())
    status, answer, _ = await post(server, "/v1/completions", body, **{"Content-Encoding": "gzip"})
    assert (status, "Content-Encoding is 'gzip'" in answer["error"]["message"]) == (415, True)
    status, _, _ = await post(
        server, "/v1/completions", {"prompt": [5], "max_tokens": 1}, **{"Content-Encoding": "identity"}
    )
    assert status == 200


async def test_sequences_that_no_client_may_have_are_refused_before_any_is_made(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1024 prompts of 128 answers each are some bytes a prompt to send, and no 429: later is no better."""
    made: list[Request] = []

    def counted(request: Request) -> tuple[Request, ...]:
        made.append(request)
        return choices(request)

    monkeypatch.setattr(answering, "choices", counted)
    group = ScriptedGroup(echo)
    server = await serve(group, http_port=0)
    body = {"prompt": [[5]] * 1024, "n": 128, "max_tokens": 1}
    status, answer, _ = await post(server, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "n asks for 131072 sequences in all; a client may have 1024 at once" in answer["error"]["message"]
    assert (made, group.requests) == ([], [])


async def test_connections_beyond_the_limit_are_refused_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "max_connections", lambda: 3)
    server = await serve(ScriptedGroup(echo), http_port=0)
    held = [await connect(server) for _ in range(3)]
    await asyncio.sleep(0.05)
    reader, _ = await connect(server)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"Retry-After" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
    for _, writer in held:
        writer.close()

    async def served() -> bool:
        try:
            return await is_served(server)
        except aiohttp.ClientError:
            return False

    async with asyncio.timeout(10):
        while not await served():
            await asyncio.sleep(0.05)
