"""Every constraint of the gRPC protocol before the real coordinator and model: what is drawn holds to it."""

import asyncio
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import GatewayServer
from tests.support.groups import group_config
from tests.support.inline_client import InlineClient

pytest.importorskip("xgrammar")

pytestmark = pytest.mark.gateway
Serve = Callable[..., Awaitable[GatewayServer]]
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "regex", "pattern": "[0-9]{2}"},
        "end": "</n>",
    },
}
HELD: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"json_schema": '{"type":"array","items":{"type":"boolean"},"minItems":2,"maxItems":2}'},
        r"\[\s*(true|false)\s*,\s*(true|false)\s*\]",
    ),
    "regex": ({"regex": "x[0-9]{3}y"}, "x[0-9]{3}y"),
    "grammar": ({"grammar": 'root ::= "(" root ")" | "q"'}, r"\(*q\)*"),
    "structural_tag": ({"structural_tag": json.dumps(TAG)}, "<n>[0-9]{2}</n>"),
    "json_object": ({"json_object": True}, r"(?s)\{.*\}"),
    "choice": ({"choice": pb.ChoiceConstraint(choices=["yes sir", "no sir"])}, "(yes|no) sir"),
}


@pytest.fixture
async def model() -> AsyncIterator[InlineClient]:
    client = InlineClient(group_config(num_speculative_tokens=3, max_model_len=256))
    yield client
    await asyncio.to_thread(client.close)


async def test_each_field_of_the_protocol_holds_its_stream(
    serve: Serve, stub_of: Any, model: InlineClient, frontend: ModelFrontend
) -> None:
    assert HELD.keys() == {f.name for f in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    server = await serve(model)
    stub = stub_of(server)

    async def text(**constraint: Any) -> tuple[str, str]:
        params = pb.SamplingParams(temperature=1.0, seed=5, max_tokens=150, **constraint)
        request = pb.GenerateRequest(text="The function returns", sampling_params=params)
        [answer] = [answer async for answer in stub.Generate(request)]
        ids = answer.complete.output_ids
        return frontend.tokenizer.decode(list(ids)), answer.complete.finish_reason

    free, _ = await text()
    for name, (constraint, pattern) in HELD.items():
        assert not re.fullmatch(pattern, free)
        found, reason = await text(**constraint)
        assert reason == "stop", name
        assert re.fullmatch(pattern, found), name


async def test_without_xgrammar_a_form_is_refused_by_name(
    serve: Serve, model: InlineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    server = await serve(model, http_port=0)
    url = f"http://127.0.0.1:{server.http_port}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body | {"response_format": {"type": "json_object"}}) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 400
        assert "pip install 'latentray[grammar]'" in error["message"]
        assert error["param"] == "response_format"
        async with session.post(url, json=body) as answer:
            assert answer.status == 200
