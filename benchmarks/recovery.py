"""Seconds from the kill of a process to the first token after it, with streams running.

    python -m benchmarks.recovery [--tp 2] [--streams 8] [--kills 3] [--num-spares 0] [--rest 1] [--model P]

Each row is one kill -9: who, when the front end knew that no token comes, when the first token came again,
and what processor time its successor had taken by then: on a busy machine the figure to compare.
"""

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

from actors.requests import RequestUpdate
from benchmarks import harness
from cluster.answering.answering import Answering
from cluster.answering.group_client import ClientFollower, GroupClient
from cluster.launch.group import GroupHandle, launch_group


async def measure(
    group: GroupHandle, num_streams: int, kills: int, rest_s: float
) -> list[tuple[str, float, float, float]]:
    """(who, seconds until it was known, seconds until a token, its successor's seconds of a processor)."""
    client = GroupClient(group.request_address, keys=group.request_keys, recovery_s=600)
    group.follow(ClientFollower(client, asyncio.get_running_loop().call_soon_threadsafe))
    rows = []
    async with client:
        answering = Answering([client])
        heard = asyncio.Event()

        async def follow(number: int) -> None:
            prompt = [hash((number, j)) % 4000 + 2 for j in range(64)]
            while True:
                request = harness.request(f"s{number}", prompt, num_tokens=400, seed=number)
                async for update in answering.run(request):
                    assert isinstance(update, RequestUpdate)
                    heard.set()

        streams = [asyncio.create_task(follow(number)) for number in range(num_streams)]
        for victim in ("shard 0", "coordinator") * kills:
            while not client.healthy:
                await asyncio.sleep(0.01)
            heard.clear()
            await token(heard, streams)
            await asyncio.sleep(rest_s)
            pid = (await asyncio.to_thread(group.process_ids))[victim]
            os.kill(pid, signal.SIGKILL)
            start_s = time.monotonic()
            while client.healthy:
                await asyncio.sleep(0.001)
            known_s = time.monotonic() - start_s
            await asyncio.sleep(0.1)  # for what was under way
            heard.clear()
            await token(heard, streams)
            resumed_s = time.monotonic() - start_s
            successor = (await asyncio.to_thread(group.process_ids))[victim]
            rows.append((victim, known_s, resumed_s, processor_s(successor)))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return rows


def processor_s(pid: int) -> float:
    """User and system time since a process began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def token(heard: asyncio.Event, streams: list[asyncio.Task[None]]) -> None:
    """Wait for one. Errors: of a stream that ends, which none does by itself."""
    waiting = asyncio.create_task(heard.wait())
    await asyncio.wait([waiting, *streams], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for stream in streams:
        if stream.done():
            stream.result()


def main() -> None:
    parser = harness.parser(__doc__)
    for name, default in [("tp", 2), ("streams", 8), ("kills", 3)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-spares", type=int, default=0)
    parser.add_argument("--rest", type=float, default=1.0, help="seconds of service before each kill")
    parser.add_argument("--model")
    args: argparse.Namespace = parser.parse_args()
    model = {"model": args.model} if args.model else {}
    config = harness.config(
        tensor_parallel_size=args.tp, max_restarts=2 * args.kills, num_spares=args.num_spares, **model
    )
    print(harness.machine())
    with launch_group(config, address="local") as group:
        rows = asyncio.run(measure(group, args.streams, args.kills, args.rest))
    for victim, known_s, resumed_s, cpu_s in rows:
        print(
            f"{victim}: known after {known_s * 1000:.0f} ms, first token after {resumed_s:.2f} s; "
            f"its successor took {cpu_s:.2f} s of a processor"
        )


if __name__ == "__main__":
    main()
