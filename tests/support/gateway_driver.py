"""Runs on the head node: two groups, a gateway on each of two nodes, one of which dies. Prints JSON lines."""

import asyncio
import json
import os
import signal
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.client import AsyncClient
from cluster.config import ServeArgs
from cluster.launch.serving import RunningServer, start_server
from kernels_integration.errors import LatentrayError
from tests.support.ray_groups import PROMPTS, eventually

PORT = 50051
ARGS = ServeArgs(
    address="auto",
    num_groups=2,
    gateways=None,  # one on every node
    host="0.0.0.0",
    insecure=True,
    port=PORT,
    http_port=None,
    dtype="float64",  # another batch must not decide
    max_model_len=512,
    num_kv_blocks=160,
)
NUM_STREAMS = 8


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


@ray.remote(num_cpus=0)
def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def stream(address: str, number: int, told: list[int]) -> tuple[int, ...] | str:
    """Its tokens, or the code of what ended it."""
    tokens: list[int] = []
    try:
        async with AsyncClient(address, decode=False) as client:
            async for piece in client.generate(
                PROMPTS[number % len(PROMPTS)], temperature=0.8, seed=number, max_tokens=200, ignore_eos=True
            ):
                tokens += piece.token_ids
                told.extend(piece.token_ids)
    except LatentrayError as error:
        return error.code
    return tuple(tokens)


async def streams(addresses: list[str], told: list[int]) -> list[tuple[int, ...] | str]:
    """The even ones by the first gateway, the odd ones by the second."""
    return list(await asyncio.gather(*(stream(addresses[n % 2], n, told) for n in range(NUM_STREAMS))))


async def used(address: str) -> list[tuple[int, int, int]]:
    async with AsyncClient(address, decode=False) as client:
        loads = await client.loads()
    stats = [load.stats for load in loads]
    return [(s.running, s.waiting, s.num_used_blocks) for s in stats if s is not None]


async def outlive(server: RunningServer) -> None:
    addresses = [gateway.reached_at for gateway in server.gateways]
    say(addresses=addresses)
    undisturbed = await streams(addresses, [])
    second = server.gateways[1].member
    assert second is not None
    told: list[int] = []
    live = asyncio.create_task(streams(addresses, told))
    await eventually(lambda: len(told) > 200, 60)
    there = NodeAffinitySchedulingStrategy(second.node.node_id, soft=False)
    await asyncio.to_thread(ray.get, kill.options(scheduling_strategy=there).remote(second.node.pid))
    found = await live
    say(
        others_unharmed=found[::2] == undisturbed[::2],
        codes=sorted({outcome for outcome in found[1::2] if isinstance(outcome, str)}),
    )
    start_s = time.monotonic()
    while any(sum(group) for group in await used(addresses[0])) and time.monotonic() < start_s + 10:
        await asyncio.sleep(0.1)
    say(used=await used(addresses[0]))
    again = await streams([addresses[0]] * 2, [])
    say(elsewhere=again == undisturbed)
    await eventually(lambda: len(server.gateways) == 2, 60)
    back: Any = await streams(addresses, [])
    async with AsyncClient(addresses[1], decode=False) as client:
        info = await client.server_info()
    say(
        back=back == undisturbed,
        addresses=[gateway.reached_at for gateway in server.gateways],
        actors=info.actors_by_node,
        failure=server.failure,
    )


def main() -> None:
    with start_server(ARGS) as server:
        asyncio.run(outlive(server))
    say(stopped=True)


if __name__ == "__main__":
    main()
