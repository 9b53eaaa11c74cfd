"""A server that runs, and a process of the same machine that has no key: every port that listens is tried."""

import asyncio
import ipaddress
import os
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest
import zmq

from actors import messages
from actors.transport import request_channel
from actors.transport.request_channel import Hello
from cluster.client import AsyncClient, Credentials
from cluster.config import ServeArgs
from cluster.launch.serving import RunningServer, start_server
from kernels_integration.errors import InvalidApiKeyError
from tests.support.listening import Listener, descendants, listeners, name_of
from tests.support.scripted_coordinator import step_input, step_output
from tests.unit.access.test_api_keys import KEY_A, TWO_TENANTS, write

pytestmark = pytest.mark.ray

SECRET_PROMPT = "the password is swordfish"
SEEDED = random.Random(11)
PAYLOADS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SEEDED.randbytes(512),
    b"\xff\0\0\0\0\0\0\0\1\x7f\x03\0NULL".ljust(64, b"\0")
    + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    b"\xff\0\0\0\0\0\0\0\1\x7f\x03\0CURVE".ljust(64, b"\0") + SEEDED.randbytes(200),
    b"LRL2" + struct.pack("<Ii", 0, 0) + bytes(32),
    b"\x16\x03\x01" + SEEDED.randbytes(300),
    SEEDED.randbytes(65536),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = write(tmp_path_factory.mktemp("access") / "keys", TWO_TENANTS)
    args = ServeArgs(
        tensor_parallel_size=2,
        port=0,
        http_port=0,
        metrics_port=0,
        api_keys=keys,
        dtype="float64",
        max_model_len=512,
        num_kv_blocks=96,
        max_restarts=0,  # whose shard is lost is lost
    )
    with start_server(args) as server:
        yield server


def opened() -> set[Listener]:
    """The server's, and those of its local Ray: all come from this process."""
    ours = descendants(os.getpid()) - {os.getpid()}
    return {listener for listener in listeners() if listener.pid in ours}


def test_nothing_listens_for_other_machines(server: RunningServer) -> None:
    found = opened()
    names = {pid: name for name, pid in server.process_ids().items()}
    assert {names.get(listener.pid) for listener in found} >= {"gateway", "coordinator"}
    public = [x for x in found if not ipaddress.ip_address(x.host).is_loopback]
    assert [(x, name_of(x.pid)) for x in public] == []


def _try(listener: Listener, payload: bytes) -> bytes:
    try:
        with socket.create_connection((listener.host, listener.port), timeout=5) as line:
            line.settimeout(0.2)
            line.sendall(payload)
            return line.recv(65536)
    except OSError:
        return b""


async def _answer(client: AsyncClient) -> tuple[int, ...]:
    answer = await client.generate(SECRET_PROMPT, stream=False, max_tokens=96, seed=1, ignore_eos=True)
    return answer.token_ids


async def test_streams_go_on_unchanged_while_every_port_is_attacked(
    server: RunningServer,
) -> None:
    coordinator = server.process_ids()["coordinator"]
    attacked = sorted(opened(), key=lambda listener: listener.port)
    async with AsyncClient(server.address, credentials=Credentials(api_key=KEY_A)) as client:
        undisturbed = await _answer(client)
        told: list[bytes] = []

        async def attack() -> None:
            for payload in PAYLOADS:
                told.extend(
                    await asyncio.gather(
                        *(asyncio.to_thread(_try, listener, payload) for listener in attacked)
                    )
                )
            for listener in attacked:
                heard = await asyncio.to_thread(_injected, listener)
                # what speaks HTTP says so
                assert not heard or listener.pid != coordinator, (
                    f"{listener} has answered a stranger: {heard}"
                )
                told.extend(heard)

        attacking = asyncio.create_task(attack())
        num_answers = 0
        while not attacking.done():
            assert await _answer(client) == undisturbed
            num_answers += 1
        await attacking
        assert num_answers > 1
        everything = b"".join(told)
        assert SECRET_PROMPT.encode() not in everything
        assert b'"data"' not in everything, "the list of models"
        [load] = await client.loads()
        assert load.stats is not None
        assert load.stats.num_dropped_messages > 0, "it is not counted"
        assert load.stats.epoch == 0
    assert server.failure is None
    logs = "".join(path.read_text() for path in Path(server.log_folder or "").glob("*.log*"))
    assert SECRET_PROMPT not in logs
    assert KEY_A not in logs


def _injected(listener: Listener) -> list[bytes]:
    """What a ZeroMQ peer with a shard's or a front end's name gets for steps, reports and requests."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard = []
    for name, frames in (
        (b"0.1.steps", (struct.pack("<BIi", 3, 0, 1), messages.encode(step_output(1)))),
        (b"0.0.steps", (struct.pack("<BIi", 5, 0, -1), messages.encode(step_input(1)))),
        (b"front end", (request_channel.encode(Hello()),)),
    ):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.ROUTING_ID, name)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{listener.host}:{listener.port}")
        stranger.send_multipart(frames)
        if stranger.poll(150):
            heard.append(b"".join(stranger.recv_multipart()))
        stranger.close()
    context.term()
    return heard


async def test_the_servers_own_ports_refuse_who_has_no_key(server: RunningServer) -> None:
    async with AsyncClient(server.address, decode=False) as client:
        with pytest.raises(InvalidApiKeyError):
            await client.generate([1], stream=False)
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/models", "/metrics", "/status.json"):
            async with session.get(f"http://127.0.0.1:{server.http_port}{path}") as answer:
                assert answer.status == 401
        context = ssl.create_default_context()
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://127.0.0.1:{server.http_port}/health", ssl=context)
    # 200 MB, which nobody reads before he knows who sends them
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary("/vllm.grpc.engine.VllmEngine/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(bytes(200 * 2**20), timeout=60)
        assert error.value.code() in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
