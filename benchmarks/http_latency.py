"""How much later a token arrives over HTTP than over gRPC.

    python -m benchmarks.http_latency [--streams 1 16 64] [--tokens 60]

A gateway in a process of its own gets a token for every stream at each tick of the clock, as from an engine
with 50 ms a step; the client notes by how much later it has each. So what is measured is the way from the
group to the client alone: text, protocol, sockets and the client's own parsing.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing.connection import Connection

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from actors.requests import Request, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from benchmarks import harness
from cluster.answering.group import Deliver
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import GatewayServer

TICK_S = 0.05
Stream = Callable[[str, int, list[float]], Coroutine[None, None, None]]


class TickingGroup:
    """Implements what a gateway needs of a Group: a token for each sequence at each tick."""

    def __init__(self) -> None:
        self.healthy = True
        self.message = ""
        self.stats: GroupStats | None = GroupStats()
        self.live: dict[SequenceKey, tuple[Request, Deliver, int]] = {}
        """With the number of tokens that each has."""

    def submit(self, request: Request, deliver: Deliver) -> None:
        self.live[request.key] = (request, deliver, 0)

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        for key in keys:
            self.live.pop(key, None)

    async def connect(self) -> None:
        pass

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S - time.monotonic() % TICK_S)
            self.give()

    def give(self) -> None:
        """One token for each stream."""
        for key, (request, deliver, done) in list(self.live.items()):
            is_last = done + 1 == request.params.max_tokens
            self.live[key] = (request, deliver, done + 1)
            if is_last:
                del self.live[key]
            deliver(
                RequestUpdate(
                    request_id=key.request_id,
                    incarnation=key.incarnation,
                    index=key.index,
                    token_ids=(500 + done,),
                    finish_reason="length" if is_last else None,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_completion_tokens=done + 1,
                )
            )


def serve(ports: Connection) -> None:
    async def run() -> None:
        config = harness.config(max_model_len=1024, kv_cache_memory_bytes="64M")
        group = TickingGroup()
        frontend = ModelFrontend.of_group(config)
        server = GatewayServer(groups=[group], config=config, frontend=frontend, port=0, http_port=0)  # type: ignore[list-item]
        await server.start()
        ports.send((server.address, server.http_port))
        await group.tick()

    asyncio.run(run())


async def over_grpc(address: str, num_tokens: int, lags: list[float]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.GenerateRequest(
            request_id=f"{time.monotonic_ns()}", stream=True, tokenized=pb.TokenizedInput(input_ids=[5, 6])
        )
        request.sampling_params.max_tokens = num_tokens
        async for response in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request):
            if response.chunk.token_ids:
                lags.append(time.monotonic() % TICK_S)


async def over_http(url: str, num_tokens: int, lags: list[float]) -> None:
    body = {"prompt": [5, 6], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                lags.append(time.monotonic() % TICK_S)


async def measure(stream: Stream, where: str, num_streams: int, num_tokens: int) -> list[float]:
    lags: list[float] = []
    await asyncio.gather(*(stream(where, num_tokens, lags) for _ in range(num_streams)))
    return sorted(lags)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    flags: argparse.Namespace = parser.parse_args()
    print(harness.machine())
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        address, port = ours.recv()
        ways: tuple[tuple[str, Stream, str], ...] = (
            ("gRPC", over_grpc, address),
            ("HTTP", over_http, f"http://127.0.0.1:{port}"),
        )
        print(f"{'streams':>7} {'over':>5} {'median':>9} {'99%':>9}")
        for num_streams, (name, stream, where) in itertools.product(flags.streams, ways):
            asyncio.run(measure(stream, where, num_streams, 3))
            lags = asyncio.run(measure(stream, where, num_streams, flags.tokens))
            late = lags[int(len(lags) * 0.99)]
            print(f"{num_streams:7} {name:>5} {statistics.median(lags) * 1e3:6.2f} ms {late * 1e3:6.2f} ms")
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
