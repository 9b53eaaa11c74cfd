"""A sequence of a Group as an iterator."""

import asyncio
from collections.abc import AsyncGenerator

from actors.requests import Request, RequestUpdate
from cluster.answering.group import Group


async def stream(group: Group, request: Request) -> AsyncGenerator[RequestUpdate, None]:
    """Its updates, or what it fails with; closing the iterator aborts it."""
    await group.connect()
    arrived: asyncio.Queue[RequestUpdate | Exception] = asyncio.Queue()
    group.submit(request, arrived.put_nowait)
    try:
        while True:
            update = await arrived.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if update.finish_reason is not None:
                return
    finally:
        group.abort([request.key])


async def tokens_of(group: Group, request: Request) -> list[int]:
    return [token async for update in stream(group, request) for token in update.token_ids]
