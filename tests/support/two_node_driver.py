"""Runs on the head node: a group over two nodes. Prints JSON lines.

`watch` goes on until the group fails, `outlive` until its requests are answered, whatever node is lost.
"""

import asyncio
import dataclasses
import json
import sys
import time

import ray

from actors.requests import Request
from cluster.answering.answering import Answering
from cluster.answering.group_client import ClientFollower, GroupClient
from cluster.launch.group import GroupHandle, launch_group
from kernels_integration.errors import UnavailableError
from tests.support.ray_groups import eventually, group_config, requests, served_tokens


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


@ray.remote(num_cpus=0)
def home_of_the_package() -> str:
    import actors

    return actors.__file__


async def serve(group: GroupHandle) -> None:
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        say(tokens=await served_tokens(client, requests()))


async def watch(group: GroupHandle) -> None:
    """Keep requests alive until the group is lost; say how long the loss took to be known."""
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        live = asyncio.create_task(served_tokens(client, requests(400, ignore_eos=True)))
        await eventually(lambda: client.stats is not None and client.stats.running == 6, 20)
        say(live=True)
        await asyncio.to_thread(sys.stdin.readline)  # "now": the test has just hit a node
        start_s = time.monotonic()
        try:
            await live
        except UnavailableError as error:
            failed_s = time.monotonic() - start_s
            unhealthy_s = failed_s + await eventually(lambda: not client.healthy, 10)
            say(failed_s=failed_s, unhealthy_s=unhealthy_s, error=str(error))
        else:
            say(error=None)


async def outlive(group: GroupHandle) -> None:
    """Requests that run while a node is lost; what became of them, and of the group."""
    client = GroupClient(group.request_address, keys=group.request_keys, recovery_s=120)
    group.follow(ClientFollower(client, asyncio.get_running_loop().call_soon_threadsafe))
    async with client:
        answering = Answering([client])

        async def tokens(request: Request) -> list[int]:
            return [token async for update in answering.run(request) for token in update.token_ids]

        asked = requests(400, ignore_eos=True)
        live = asyncio.gather(*map(tokens, asked))
        await eventually(lambda: client.stats is not None and client.stats.running == 6, 20)
        say(live=True)
        await asyncio.to_thread(sys.stdin.readline)
        start_s = time.monotonic()
        found = await live
        served = {request.request_id: its for request, its in zip(asked, found, strict=True)}
        say(
            tokens=served,
            seconds=time.monotonic() - start_s,
            ips={name: node.ip for name, node in group.placement.items()},
        )


def main() -> None:
    if sys.argv[1:] == ["outlive"]:
        with launch_group(group_config(2, 1), address="auto") as group:
            say(ips={name: node.ip for name, node in group.placement.items()})
            asyncio.run(outlive(group))
        return
    with launch_group(dataclasses.replace(group_config(4, 2), max_restarts=0), address="auto") as group:
        say(
            collectives=group.collectives,
            ips={name: node.ip for name, node in group.placement.items()},
            package=ray.get(home_of_the_package.remote()),
        )
        asyncio.run(watch(group) if sys.argv[1:] == ["watch"] else serve(group))
        start_s = time.monotonic()
    say(stop_s=time.monotonic() - start_s)


if __name__ == "__main__":
    main()
