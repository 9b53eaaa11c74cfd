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
import statistics
import time
from collections.abc import Callable, Coroutine

import aiohttp
import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks import harness
from benchmarks.ticking_gateway import TICK_S, ticking_gateway

Stream = Callable[[str, int, list[float]], Coroutine[None, None, None]]


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
    with ticking_gateway() as gateway:
        ways: tuple[tuple[str, Stream, str], ...] = (
            ("gRPC", over_grpc, gateway.address),
            ("HTTP", over_http, f"http://127.0.0.1:{gateway.http_port}"),
        )
        print(f"{'streams':>7} {'over':>5} {'median':>9} {'99%':>9}")
        for num_streams, (name, stream, where) in itertools.product(flags.streams, ways):
            asyncio.run(measure(stream, where, num_streams, 3))
            lags = asyncio.run(measure(stream, where, num_streams, flags.tokens))
            late = lags[int(len(lags) * 0.99)]
            print(f"{num_streams:7} {name:>5} {statistics.median(lags) * 1e3:6.2f} ms {late * 1e3:6.2f} ms")


if __name__ == "__main__":
    main()
