"""What clients ask and are told stands in no log, metric or status page, however their requests end."""

import asyncio
import contextlib
import logging
from typing import Any

import aiohttp
import pytest

from cluster.client import AsyncClient
from kernels_integration.errors import LatentrayError, UnavailableError
from tests.gateway.conftest import Serve
from tests.support.scripted_group import ScriptedGroup, echo

SECRET = "swordfish-17"
CHAT = [{"role": "user", "content": f"my password is {SECRET}"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "answered": ("/v1/completions", {"prompt": SECRET, "max_tokens": 4, "stop": [SECRET]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
    "streamed": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    "too long": ("/v1/completions", {"prompt": SECRET * 4000}),
    "refused value": ("/v1/completions", {"prompt": SECRET, "temperature": -1}),
    "refused type": ("/v1/chat/completions", {"messages": SECRET}),
    "refused grammar": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"regex": f"({SECRET}"}},
    ),
    "unknown role": ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": SECRET}]}),
    "responses": ("/v1/responses", {"input": SECRET, "max_output_tokens": 4}),
}
FAULTS = {
    "works": None,
    "lost": UnavailableError("shard 1 is lost"),
    "a fault of ours": RuntimeError("bug"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_texts_stay_between_client_and_group(
    serve: Serve, caplog: pytest.LogCaptureFixture, fault: Exception | None
) -> None:
    caplog.set_level(logging.DEBUG)
    group = ScriptedGroup(echo if fault is None else lambda request: [fault] * 20)
    server = await serve(group, http_port=0)
    base = f"http://127.0.0.1:{server.http_port}"
    async with aiohttp.ClientSession() as session:
        for path, body in BODIES.values():
            async with session.post(base + path, json=body) as answer:
                await answer.read()
        broken = {"data": f'{{"prompt": "{SECRET}"', "headers": {"Content-Type": "application/json"}}
        async with session.post(f"{base}/v1/completions", **broken) as answer:
            assert answer.status == 400
        async with session.post(f"{base}/tokenize", json={"prompt": SECRET}) as answer:
            assert answer.status == 200
        async with AsyncClient(server.address) as client:
            for params in ({"max_tokens": 4}, {"stop": [SECRET], "max_tokens": 4}, {"max_tokens": 10**6}):
                with contextlib.suppress(LatentrayError):
                    await asyncio.wait_for(client.generate(SECRET, stream=False, **params), 30)
        told = [caplog.text]
        for path in ("/metrics", "/status.json", "/status", "/health"):
            async with session.get(base + path) as answer:
                told.append(await answer.text())
    assert len(caplog.records) > len(BODIES), "each request has a line"
    for text in told:
        assert SECRET not in text
