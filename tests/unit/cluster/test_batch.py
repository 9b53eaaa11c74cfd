"""Batches against a scripted engine: order, errors of rows, bounds, interruption."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.requests import Request
from cluster.batch import BatchSummary, run_batch
from cluster.batch.results import StreamedResults
from cluster.batch.rows import MAX_ROW_BYTES, InputRow
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.report.output_file import open_output
from kernels_integration.errors import InvalidRequestError, OverloadedError, UnavailableError
from tests.support.scripted_chat import chat_frontend
from tests.support.scripted_engine import Answer, ScriptedEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, seed=0
    )


def row(custom_id: str = "a", url: str = COMPLETIONS, **body: Any) -> str:
    body = body or {"prompt": "Hi"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def echo(request: Request) -> Answer:
    """The prompt without its beginning of text."""
    return tuple(t for t in request.prompt_token_ids if t > 2)


def run(
    frontend: ModelFrontend,
    lines: list[str | bytes],
    *,
    answer: Callable[[Request], Answer] = echo,
    max_in_flight: int = 4,
) -> tuple[list[dict[str, Any]], BatchSummary, ScriptedEngine]:
    engine, written = ScriptedEngine(answer), []
    summary = run_batch(
        numbered(lines),
        StreamedResults(lambda line: written.append(json.loads(line))),
        engine=engine,
        frontend=frontend,
        max_in_flight=max_in_flight,
        sleep=lambda seconds: None,
    )
    return written, summary, engine


def numbered(lines: Iterable[str | bytes]) -> Iterator[InputRow]:
    return (InputRow(line=line, place=f"line {number}") for number, line in enumerate(lines, start=1))


def test_rows_take_what_http_takes(frontend: ModelFrontend) -> None:
    """Several prompts, an echo, and tools."""
    template = str(Path(__file__).parent / "templates" / "glm_style.jinja")
    thinking = chat_frontend(template)
    text = "<think>Hm.</think>I ask.<tool_call>now</tool_call>"
    said = tuple(thinking.tokenizer.encode(text, add_special_tokens=False))
    tools = [{"type": "function", "function": {"name": "now"}}]
    chat = [{"role": "user", "content": "Hello"}]
    [answer], _, _ = run(thinking, [row("c", CHAT, messages=chat, tools=tools)], answer=lambda _: said)
    message = answer["response"]["body"]["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I ask.", "Hm.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]

    lines = [row("p", prompt=["one", "two", [5, 6]], echo=True), row("q", prompt=["x", "y"])]
    [first, second], summary, _ = run(frontend, list(lines))
    texts = [choice["text"] for choice in first["response"]["body"]["choices"]]
    assert texts[:2] == ["oneone", "twotwo"]
    assert [choice["index"] for choice in first["response"]["body"]["choices"]] == [0, 1, 2]
    assert second["response"]["body"]["id"] == f"cmpl-{second['response']['request_id']}"
    assert (summary.num_rows, summary.num_failed) == (2, 0)
    total = first["response"]["body"]["usage"]["total_tokens"]
    total += second["response"]["body"]["usage"]["total_tokens"]
    assert total == summary.num_prompt_tokens + summary.num_completion_tokens

    def refuse(request: Request) -> Answer:
        return InvalidRequestError("no", field="x") if request.request_id.endswith("-1") else echo(request)

    [failed], summary, _ = run(frontend, [row("p", prompt=["one", "two", "three"])], answer=refuse)
    assert (failed["error"]["message"], summary.num_failed) == ("no", 1)


def test_answers_have_openais_shape(frontend: ModelFrontend) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    lines = [
        row("c", CHAT, messages=chat, logprobs=True, top_logprobs=1, model="tiny-dsa"),
        row("t", COMPLETIONS, prompt="one two", logprobs=1),
    ]
    [first, second], summary, _ = run(frontend, list(lines))
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["custom_id"], first["error"], first["response"]["status_code"]) == ("c", None, 200)
    body = first["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny-dsa")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "length"
    entry = choice["logprobs"]["content"][0]
    assert entry["bytes"] == list(entry["token"].encode())
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    text = second["response"]["body"]["choices"][0]
    assert text["text"] == "one two"
    for start, token in zip(text["logprobs"]["text_offset"], text["logprobs"]["tokens"], strict=True):
        assert text["text"][start:].startswith(token)
    assert (summary.num_rows, summary.num_failed) == (2, 0)
    assert summary.num_completion_tokens == sum(
        r["response"]["body"]["usage"]["completion_tokens"] for r in (first, second)
    )


def test_answers_come_in_the_order_of_the_rows(frontend: ModelFrontend) -> None:
    lines = [row(str(i), prompt=[3 + i]) for i in range(50)]
    written, _, engine = run(frontend, list(lines), max_in_flight=7)
    assert [r["custom_id"] for r in written] == [str(i) for i in range(50)]
    assert engine.most_in_flight == 7
    assert sorted(r.prompt_token_ids for r in engine.submitted) == [(3 + i,) for i in range(50)]


def test_a_slow_row_stalls_no_other(frontend: ModelFrontend) -> None:
    """The scripted engine ends the newest first: with two in flight the first row ends as the last of all."""
    lines = [row(str(i), prompt=[3], max_tokens=60 if i == 0 else 1) for i in range(2500)]
    written: list[bytes] = []
    written_at_end: list[int] = []

    def answer(request: Request) -> Answer:
        if request.params.max_tokens == 60:
            written_at_end.append(len(written))
            assert len(engine.submitted) == 2500
        return (5,)

    engine = ScriptedEngine(answer)
    run_batch(
        numbered(lines),
        StreamedResults(written.append),
        engine=engine,
        frontend=frontend,
        max_in_flight=2,
    )
    assert written_at_end == [0], "no row before the first one"
    assert [json.loads(line)["custom_id"] for line in written] == [str(i) for i in range(2500)]


BAD_ROWS: list[tuple[str | bytes, str | None, str]] = [
    ("not json", None, "line 1 is not JSON"),
    (b"\xff\xfe", None, "line 1 is not JSON"),
    ("[1]", None, "line 1 holds a list; it must hold one JSON object"),
    ("[" * 5000, None, "line 1 is not JSON"),
    ('{"url": "/v1/completions", "body": {}}', None, "custom_id is missing"),
    ('{"custom_id": 5, "url": "/v1/completions", "body": {}}', None, "custom_id is 5; it must be text"),
    ('{"custom_id": "a", "body": {"prompt": "x"}}', "a", "url is missing"),
    ('{"custom_id": "a", "url": "/v1/completions"}', "a", "body is missing"),
    ('{"custom_id": "a", "url": "/v1/completions", "body": "x"}', "a", "body is 'x'; it must be an object"),
    ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "a", "must be POST"),
    (row("a", "/v1/embeddings"), "a", "it must be one of /v1/chat/completions, /v1/completions"),
    (row("a", model="gpt", prompt="x"), "a", "the model served here is 'tiny-dsa'"),
    (row("a", prompt="x", best_of=3), "a", "parameter best_of is 3, which is not supported"),
    (row("a", prompt="x", top_p=7), "a", "top_p is 7; it must be a number above 0"),
    (row("a", prompt="word " * 99), "a", "max_model_len 64"),
    (row("a\ud800"), None, "custom_id is 'a\\ud800'; it must be text"),
    (row("a", prompt="x\ud800"), "a", "prompt holds '\\ud800' at character 1"),
    (
        row("a", CHAT, messages=[{"role": "user", "content": "\udfff"}]),
        "a",
        "messages[0].content holds '\\udfff'",
    ),
    ('{"custom_id": "a", "url": "/v1/completions", "prompt": "x"}', "a", "'prompt' is no key of a row"),
    (row("a", prompt="x", stop="\ud800"), "a", "stop holds '\\ud800' at character 0"),
    (row("a", prompt="x", bad_words=["\ud800"]), "a", "bad_words[0] holds '\\ud800' at character 0"),
    (row("a", prompt="x", top_k=10**30), "a", "top_k is 1000000000000000000000000000000; it must be"),
    (row("a", prompt="x", max_tokens=2**63), "a", "max_tokens is 9223372036854775808; it must be"),
    (row("a", prompt="x", stop=[f"s{i}" for i in range(100_000)]), "a", "at most 16 non-empty strings"),
]


@pytest.mark.parametrize(("line", "custom_id", "words"), BAD_ROWS)
def test_a_bad_row_is_answered_with_its_fault_and_the_batch_goes_on(
    frontend: ModelFrontend, line: str | bytes, custom_id: str | None, words: str
) -> None:
    [bad, good], summary, engine = run(frontend, [line, row("good")])
    assert bad["custom_id"] == custom_id
    codes = {"model served": "model_not_found", "max_model_len 64": "context_length_exceeded"}
    unknown = "unknown" in bad["error"]["message"].partition(";")[0]
    expected = next((code for part, code in codes.items() if part in words), "invalid_request")
    assert bad["error"]["code"] == ("unknown_parameter" if unknown else expected)
    assert words in bad["error"]["message"]
    assert bad["response"]["status_code"] == (404 if "model served" in words else 400)
    error = bad["response"]["body"]["error"]
    assert (error["message"], error["type"]) == (bad["error"]["message"], "invalid_request_error")
    assert error["param"]
    assert good["error"] is None
    assert (summary.num_rows, summary.num_failed, len(engine.submitted)) == (2, 1, 1)


@pytest.mark.parametrize("line", [row("a", **{"\ud800": 1}), '{"custom_id": "a", "url": "\\udfff"}'])
def test_a_lone_surrogate_anywhere_is_one_row_that_failed(
    frontend: ModelFrontend, tmp_path: Path, line: str
) -> None:
    engine, path = ScriptedEngine(echo), tmp_path / "o.jsonl"
    with open_output(str(path)) as output:
        results = StreamedResults(output.write_line)
        run_batch(numbered([line, row("b")]), results, engine=engine, frontend=frontend, max_in_flight=2)
    bad, good = map(json.loads, path.read_bytes().splitlines())
    assert bad["custom_id"] == "a"
    assert bad["error"]["code"] == ("unknown_parameter" if "ud800" in line else "invalid_request")
    assert good["error"] is None


def test_a_row_beyond_the_limit_is_refused_before_it_is_parsed(frontend: ModelFrontend) -> None:
    [bad, good], _, _ = run(frontend, [row("a", prompt="x" * MAX_ROW_BYTES), row("b")])
    assert "line 1 has more than 16777216 bytes" in bad["error"]["message"]
    assert bad["custom_id"] is None, "it was not even looked into"
    assert good["error"] is None


def test_a_custom_id_counts_once(frontend: ModelFrontend) -> None:
    [_, again, other], summary, _ = run(frontend, [row("a"), row("a"), row("b")])
    assert "custom_id 'a' is taken by an earlier row" in again["error"]["message"]
    assert other["error"] is None
    assert (summary.num_rows, summary.num_failed) == (3, 1)


def test_a_request_that_fails_is_a_row_that_failed(frontend: ModelFrontend) -> None:
    def answer(request: Request) -> Answer:
        if request.prompt_token_ids == (7,):
            return OverloadedError("queue full")
        return echo(request)

    lines = [row("a"), row("b", prompt=[7]), row("c")]
    written, summary, engine = run(frontend, list(lines), answer=answer)
    assert [r["response"]["status_code"] for r in written] == [200, 429, 200]
    assert written[1]["error"] == {"code": "overloaded", "message": "queue full (tried 4 times)"}
    assert summary.num_failed == 1
    tries = [r.request_id for r in engine.submitted if r.prompt_token_ids == (7,)]
    assert len(set(tries)) == 4, "each try has an id of its own"
    assert written[1]["id"] == f"batch_req_{tries[0]}"


def test_a_failure_that_passes_is_no_failure(frontend: ModelFrontend) -> None:
    failures = [OverloadedError("queue full"), OverloadedError("queue full")]
    written, summary, _ = run(
        frontend, [row("a")], answer=lambda request: failures.pop() if failures else echo(request)
    )
    assert (written[0]["error"], summary.num_failed) == (None, 0)


def test_a_bad_request_is_not_tried_again(frontend: ModelFrontend) -> None:
    refused = InvalidRequestError("no", field="prompt")
    _, summary, engine = run(frontend, [row("a")], answer=lambda request: refused)
    assert (summary.num_failed, len(engine.submitted)) == (1, 1)


def test_a_row_without_a_seed_has_one_of_its_own(frontend: ModelFrontend) -> None:
    """It depends on its custom_id and --seed alone: not on which rows were answered before."""
    _, _, engine = run(frontend, [row(name) for name in "abc"] + [row("d", prompt="x", seed=5)])
    seeds = {request.request_id: request.seed for request in engine.submitted}
    assert len(set(seeds.values())) == 4
    assert 5 in seeds.values()
    _, _, later = run(frontend, [row("c"), row("a")])
    assert all(seeds[request.request_id] == request.seed for request in later.submitted)


def test_a_lost_engine_ends_the_batch(frontend: ModelFrontend) -> None:
    engine = ScriptedEngine(lambda r: UnavailableError("shard 1 is lost"))
    with pytest.raises(UnavailableError, match="shard 1 is lost"):
        run_batch(
            numbered([row("a"), row("b"), row("c")]),
            StreamedResults(lambda line: None),
            engine=engine,
            frontend=frontend,
            max_in_flight=2,
        )
    assert (len(engine.aborted), len(engine.submitted)) == (1, 2), "rows in flight end, others do not begin"
