"""What a gateway costs: messages a second, and how much later a token arrives, by the number of streams.

    python -m benchmarks.gateway_load [--streams 1 16 64 512] [--seconds 5]

A gateway in a process of its own, before a group that gives each stream a token at each tick. Added latency:
from the tick to the client's message, at one token a stream every 50 ms. Messages a second: the group gives
tokens as fast as the loop lets it; of a client that is behind they are merged, so both are counted.
"""

import argparse
import asyncio
import statistics
import time

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks import harness
from benchmarks.http_latency import measure, over_grpc
from benchmarks.ticking_gateway import TICK_S, ticking_gateway

FAST_TICK_S = 0.001
"""Or as often as the loop gets to it."""


async def throughput(address: str, num_streams: int, seconds: float) -> tuple[float, float]:
    """(messages, tokens) a second over all streams."""
    num_messages = num_tokens = 0
    is_counting = False

    async def stream(number: int) -> None:
        nonlocal num_messages, num_tokens
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        while True:
            request = pb.GenerateRequest(
                request_id=f"{time.monotonic_ns()}-{number}",
                stream=True,
                tokenized=pb.TokenizedInput(input_ids=[5, 6]),
            )
            request.sampling_params.max_tokens = 2000
            async for response in stub.Generate(request):
                if is_counting:
                    num_messages += 1
                    num_tokens += len(response.chunk.token_ids)

    async with grpc.aio.insecure_channel(address) as channel:
        streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
        await asyncio.sleep(1.0)
        is_counting, start_s = True, time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - start_s
        is_counting = False
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return num_messages / took_s, num_tokens / took_s


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    flags: argparse.Namespace = parser.parse_args()
    print(harness.machine())
    num_tokens = int(flags.seconds / TICK_S)
    with ticking_gateway() as slow, ticking_gateway(FAST_TICK_S, max_model_len=2048) as fast:
        print(f"{'streams':>7} {'later by':>11} {'99%':>10} {'messages/s':>11} {'tokens/s':>9}")
        for num_streams in flags.streams:
            lags = asyncio.run(measure(over_grpc, slow.address, num_streams, num_tokens))
            late = lags[int(len(lags) * 0.99)]
            messages, tokens = asyncio.run(throughput(fast.address, num_streams, flags.seconds))
            print(
                f"{num_streams:7} {statistics.median(lags) * 1e3:8.2f} ms {late * 1e3:7.2f} ms "
                f"{messages:11.0f} {tokens:9.0f}"
            )


if __name__ == "__main__":
    main()
