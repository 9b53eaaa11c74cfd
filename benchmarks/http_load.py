"""What many, slow and hostile HTTP clients get, and what becomes of a gRPC client beside them.

    python -m benchmarks.http_load [--only NAME ...] [--scale 1.0]

A gateway in a process of its own gets a token for every stream at each tick of 50 ms. A gRPC client asks it
for one answer after the other, alone and beside each attack. For each: how HTTP clients were answered, how
many answers the gRPC client had, its longest gap between two tokens and its longest wait for a first one,
what the gateway grew by, and what was left of the attack afterwards: sequences, and open files.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks import harness
from benchmarks.ticking_gateway import ticking_gateway

LARGE_BYTES = 16 * 2**20
"""Of a body, more than is taken; half of it is taken and then refused as a prompt."""
HELD_S = 4.0
"""How long slow clients stay."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_HEADERS = {"Content-Type": "application/json"}

Answers = Counter[str]
Attack = Callable[[int, int, float], Coroutine[None, None, Answers]]
"""(port, number of clients, seconds that slow ones stay) -> how many were answered how."""


def ask(**more: Any) -> bytes:
    return json.dumps({"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True} | more).encode()


async def streams(port: int, count: int, held_s: float) -> Answers:
    """As many streams at once, read to their ends."""
    answers: Answers = Counter()

    async def one(session: aiohttp.ClientSession) -> None:
        url = f"http://127.0.0.1:{port}/v1/completions"
        async with session.post(url, data=ask(stream=True), headers=_HEADERS) as answer:
            text = await answer.text()
            whole = text.endswith("data: [DONE]\n\n")
            answers[f"{answer.status} whole" if whole else f"{answer.status}"] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    return answers


async def slow_readers(port: int, count: int, held_s: float) -> Answers:
    """Streams of eight choices, of which nobody reads a byte."""
    body = ask(stream=True, max_tokens=1000, n=8)
    return await _held(port, count, held_s, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


async def storm(port: int, count: int, held_s: float) -> Answers:
    """Clients that ask and leave, half of them at once and half after the first piece."""
    body = ask(stream=True, max_tokens=1000)
    answers: Answers = Counter()

    async def one(number: int) -> None:
        async with _connection(port) as (reader, writer):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            if number % 2:
                answers[_status(await reader.read(2**10))] += 1
            else:
                answers["left at once"] += 1
            writer.transport.abort()

    await asyncio.gather(*(one(number) for number in range(count)))
    return answers


async def slow_heads(port: int, count: int, held_s: float) -> Answers:
    """Heads that come letter by letter."""
    return await _held(port, count, held_s, HEAD, drip=b"X")


async def slow_bodies(port: int, count: int, held_s: float) -> Answers:
    """Bodies that come letter by letter."""
    return await _held(port, count, held_s, HEAD + b"Content-Length: 100000\r\n\r\n{", drip=b" ")


async def large_bodies(port: int, count: int, held_s: float) -> Answers:
    """Bodies of half the limit and beyond it, all at once."""
    answers: Answers = Counter()
    contents = [ask(prompt="word " * (size // 5)) for size in (LARGE_BYTES // 2, LARGE_BYTES)]

    async def one(session: aiohttp.ClientSession, content: bytes) -> None:
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            async with session.post(url, data=content, headers=_HEADERS) as answer:
                await answer.read()
                answers[str(answer.status)] += 1
        except aiohttp.ClientConnectionError:
            answers["closed"] += 1  # refused before all of it was sent

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = itertools.islice(itertools.cycle(contents), count)
        await asyncio.gather(*(one(session, content) for content in bodies))
    return answers


async def header_floods(port: int, count: int, held_s: float) -> Answers:
    """Too many headers, too long ones, too long paths, and no HTTP at all."""
    floods = [
        HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(1000)) + b"\r\n",
        HEAD + b"X-Long: " + b"y" * 2**20 + b"\r\n\r\n",
        b"GET /" + b"y" * 2**17 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01 no HTTP at all\r\n\r\n",
    ]
    answers: Answers = Counter()

    async def one(flood: bytes) -> None:
        async with _connection(port) as (reader, writer):
            writer.write(flood)
            answers[_status(await reader.read(2**10))] += 1

    await asyncio.gather(*(one(flood) for flood in itertools.islice(itertools.cycle(floods), count)))
    return answers


ATTACKS: Mapping[str, tuple[Attack, int]] = {
    "streams": (streams, 500),
    "slow readers": (slow_readers, 100),
    "leaving clients": (storm, 1000),
    "slow heads": (slow_heads, 500),
    "slow bodies": (slow_bodies, 500),
    "16 MB bodies": (large_bodies, 16),
    "header floods": (header_floods, 400),
}
"""By name, with the number of clients."""


@contextlib.asynccontextmanager
async def _connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A reset by the server ends what is done with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            yield reader, writer
    finally:
        writer.transport.abort()


async def _held(port: int, count: int, held_s: float, sent: bytes, drip: bytes = b"") -> Answers:
    """Connections that are kept for so long, and dripped into; all that the server says stays unread."""
    sockets = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, sent)
        sockets.append(client)
    ends_at = time.monotonic() + held_s
    while time.monotonic() < ends_at:
        await asyncio.sleep(0.2)
        for client in sockets if drip else ():
            with contextlib.suppress(OSError):
                client.send(drip)
    answers: Answers = Counter()
    for client in sockets:
        try:
            answers[_status(client.recv(2**10))] += 1
        except OSError:
            answers["kept waiting"] += 1
        client.close()
    return answers


def _status(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"


@dataclass
class Beside:
    """What a gRPC client saw."""

    answers: int = 0
    failures: int = 0
    longest_gap_s: float = 0.0
    longest_wait_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, address: str, num_tokens: int = 20) -> None:
        """One answer after the other, and one more once it is done."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            while True:
                is_last = self.done.is_set()
                await self._one(stub, num_tokens)
                if is_last:
                    return

    async def _one(self, stub: Any, num_tokens: int) -> None:
        request = pb.GenerateRequest(
            request_id=f"beside-{time.monotonic_ns()}",
            stream=True,
            tokenized=pb.TokenizedInput(input_ids=[5, 6]),
        )
        request.sampling_params.max_tokens = num_tokens
        request.sampling_params.ignore_eos = True
        before, seen = time.monotonic(), 0
        try:
            async for response in stub.Generate(request):
                if response.chunk.token_ids:
                    now, gap = time.monotonic(), time.monotonic() - before
                    if seen:
                        self.longest_gap_s = max(self.longest_gap_s, gap)
                    else:
                        self.longest_wait_s = max(self.longest_wait_s, gap)
                    before, seen = now, seen + len(response.chunk.token_ids)
        except grpc.aio.AioRpcError:
            pass
        self.answers += seen == num_tokens
        self.failures += seen != num_tokens


async def _measured(attack: Attack | None, count: int, address: str, port: int) -> tuple[Answers, Beside]:
    beside = Beside()
    client = asyncio.create_task(beside.run(address))
    await asyncio.sleep(0.2)
    answers: Answers = Counter()
    if attack is None:
        await asyncio.sleep(HELD_S)
    else:
        answers = await attack(port, count, HELD_S)
    beside.done.set()
    await client
    return answers, beside


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=[*ATTACKS])
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of clients")
    flags = parser.parse_args()
    print(harness.machine())
    with ticking_gateway() as gateway:
        address, port = gateway.address, gateway.http_port
        asyncio.run(streams(port, 10, 0))
        _, files_before = gateway.left()
        print(f"{'attack':>16} {'clients':>7} {'gRPC':>9} {'gap':>8} {'wait':>8} {'grew':>8}  left  answers")
        for name in ("nothing", *flags.only):
            attack, whole = ATTACKS.get(name, (None, 0))
            count, before = max(int(whole * flags.scale), 1), gateway.resident_bytes
            answers, beside = asyncio.run(_measured(attack, count, address, port))
            deadline = time.monotonic() + 30
            while (now := gateway.left()) > (0, files_before + 2) and time.monotonic() < deadline:
                time.sleep(0.2)
            grew = (gateway.resident_bytes - before) / 2**20
            print(
                f"{name:>16} {count if attack else 0:7} {beside.answers:4} ({beside.failures} bad)"
                f" {beside.longest_gap_s * 1e3:5.0f} ms {beside.longest_wait_s * 1e3:5.0f} ms {grew:4.0f} MiB"
                f"  {now[0]}, {now[1] - files_before:+}  {dict(answers)}"
            )


if __name__ == "__main__":
    main()
