"""What HTTP takes, batch takes: each body through both doors makes the same requests and the same answer."""

import json
from typing import Any

import pytest

from actors.requests import Request
from cluster.batch import run_batch
from cluster.batch.results import StreamedResults
from cluster.batch.rows import InputRow
from cluster.gateway import GatewayServer
from tests.gateway.conftest import GLM
from tests.gateway.test_http import post
from tests.support.scripted_chat import chat_frontend
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_group import Script, ScriptedGroup, update
from tests.unit.cluster.test_answer_reader import TOOLS

pytestmark = pytest.mark.gateway
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "Hi"}]
SAID = "<think>Hm.</think>I ask. <tool_call>now</tool_call>"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
SHARED: list[dict[str, Any]] = [
    {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"logit_bias": {"5": 1}, "allowed_token_ids": [5, 6, 7], "bad_words": ["no"]},
    {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]},
    {"stop": ["ask"], "include_stop_str_in_output": True},
    {"skip_special_tokens": False},
    {"priority": -2},
    {"cache_salt": "s"},
    {"user": "me", "metadata": {}, "store": False},
]
OF_CHATS: list[dict[str, Any]] = [
    {"n": 1, "logprobs": True, "top_logprobs": 0},
    {"max_completion_tokens": 7},
    {"prompt_logprobs": 0},
    {"response_format": FORM},
    {"structured_outputs": {"regex": "a+"}},
    {"guided_choice": ["a", "b"]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False},
    {"messages": [*ASK, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
    {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": "required"},
]
OF_COMPLETIONS: list[dict[str, Any]] = [
    {"n": 1, "logprobs": 0},
    {"prompt": ["Hi", [5, 6], "Ho"]},
    {"echo": True, "max_tokens": 5},
    {"echo": True, "max_tokens": 0},
    {"response_format": {"type": "json_object"}},
]
OF_RESPONSES: list[dict[str, Any]] = [
    {"instructions": "Be brief.", "max_output_tokens": 7},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    {"tools": [{"type": "function"} | tool["function"] for tool in TOOLS]},
]
TAKEN = [
    *((CHAT, {"messages": ASK} | change) for change in (*SHARED, *OF_CHATS)),
    *((COMPLETIONS, {"prompt": "Hi", "max_tokens": 9} | change) for change in (*SHARED, *OF_COMPLETIONS)),
    *((RESPONSES, {"input": "Hi"} | change) for change in (*SHARED, *OF_RESPONSES)),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": ASK, "model": "gpt"}),
    (CHAT, {"messages": ASK, "temperature": -1}),
    (CHAT, {"messages": ASK, "nonsense": 1}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": ASK, "tool_choice": "auto"}),
    (CHAT, {"messages": ASK, "guided_regex": "a("}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "x" * 30_000}),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}),
    (RESPONSES, {"input": "Hi", "previous_response_id": "r"}),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}),
]
FRONTEND = chat_frontend(str(GLM), scheduling_policy="priority")


def said(request: Request) -> tuple[int, ...]:
    ids = FRONTEND.tokenizer.encode(SAID, add_special_tokens=False)
    return tuple(ids[: request.params.max_tokens])


def without_ids(value: Any) -> Any:
    """The same without what differs from one answer to the next."""
    if isinstance(value, dict):
        own = ("id", "call_id", "item_id", "created", "created_at")
        return {k: without_ids(v) for k, v in value.items() if k not in own}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


def shape(request: Request) -> Any:
    """All of a request but whose it is."""
    salt, priority = request.cache_salt, request.priority
    return request.prompt_token_ids, request.params, request.bad_words, salt, priority


async def over_http(url: str, body: dict[str, Any], config: Any) -> tuple[int, Any, list[Request]]:
    def script(request: Request) -> Script:
        return [update(request, said(request), finish_reason="length")]

    group = ScriptedGroup(script)
    server = GatewayServer(groups=[group], config=config, frontend=FRONTEND, port=0, http_port=0)
    await server.start()
    try:
        status, answer, _ = await post(server, url, body)
    finally:
        await server.stop(drain_s=0)
    return status, answer, group.requests


def in_a_batch(url: str, body: dict[str, Any]) -> tuple[int, Any, list[Request]]:
    engine, rows = ScriptedEngine(said), []
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    run_batch(
        iter([InputRow(line=line, place="line 1")]),
        StreamedResults(lambda row: rows.append(json.loads(row))),
        engine=engine,
        frontend=FRONTEND,
        max_in_flight=4,
        sleep=lambda seconds: None,
    )
    [row] = rows
    return row["response"]["status_code"], row["response"]["body"], engine.submitted


@pytest.mark.parametrize(("url", "body"), TAKEN, ids=lambda value: str(value)[:80])
async def test_a_body_is_the_same_in_both(config: Any, url: str, body: dict[str, Any]) -> None:
    body = body | {"seed": 3}
    status, answer, requests = await over_http(url, body, config)
    assert status == 200, answer
    of_row, row, submitted = in_a_batch(url, body)
    assert of_row == 200, row
    assert sorted(map(repr, map(shape, requests))) == sorted(map(repr, map(shape, submitted)))
    assert row.keys() == answer.keys()
    if "logprobs" not in body:  # which the two scripts make up
        assert without_ids(row) == without_ids(answer)


@pytest.mark.parametrize(("url", "body"), REFUSED, ids=lambda value: str(value)[:80])
async def test_a_refusal_is_the_same_in_both(config: Any, url: str, body: dict[str, Any]) -> None:
    status, answer, _ = await over_http(url, body, config)
    assert 400 <= status < 500
    assert in_a_batch(url, body)[:2] == (status, answer)
