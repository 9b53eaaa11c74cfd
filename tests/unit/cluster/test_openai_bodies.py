"""OpenAI bodies, read strictly."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.structured_outputs import MAX_LENGTH, StructuredOutputs
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.bodies import check_model, parse_body
from kernels_integration.errors import InvalidRequestError
from tests.support.scripted_chat import chat_frontend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
GLM = Path(__file__).parent / "templates" / "glm_style.jinja"


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, seed=0
    )


def test_parameters_arrive(frontend: ModelFrontend) -> None:
    body = {
        "messages": MESSAGES,
        "temperature": 0.3,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "max_completion_tokens": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "skip_special_tokens": False,
        "user": "someone",
        "n": 1,
        "stream": False,
        "presence_penalty": 0,
        "logit_bias": None,
    }
    params = parse_body(CHAT, body).to_requests("r", frontend)[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.logprobs) == (11, 9, 2)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (4,))
    assert params.ignore_eos
    assert not params.skip_special_tokens


def test_priority_and_salt_arrive() -> None:
    frontend = ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, scheduling_policy="priority"
    )
    for url, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})):
        request = parse_body(url, body | {"priority": -3, "cache_salt": "a"}).to_requests("r", frontend)[0]
        assert (request.priority, request.cache_salt) == (-3, "a")
        plain = parse_body(url, body).to_requests("r", frontend)[0]
        assert (plain.priority, plain.cache_salt) == (0, None)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("priority", 1, "--scheduling-policy priority"),
        ("priority", 1.5, "whole number"),
        ("priority", True, "whole number"),
        ("priority", 2**63, "64 bits"),
        ("cache_salt", "", "1 to 1024 characters"),
        ("cache_salt", "a" * 1025, "1 to 1024 characters"),
        ("cache_salt", 5, "text"),
    ],
)
def test_bad_priorities_and_salts_are_refused(frontend: ModelFrontend, field, value, rule) -> None:
    body = parse_body(CHAT, {"messages": MESSAGES, field: value})
    with pytest.raises(InvalidRequestError, match=rule) as caught:
        body.to_requests("r", frontend)[0]
    assert caught.value.field == field


def test_defaults_are_the_checkpoints_and_openais(frontend: ModelFrontend) -> None:
    chat = parse_body(CHAT, {"messages": MESSAGES}).to_requests("r", frontend)[0].params
    assert (chat.temperature, chat.top_p, chat.max_tokens, chat.logprobs) == (0.7, 0.9, None, None)
    text = parse_body(COMPLETIONS, {"prompt": "Hi", "logprobs": 0}).to_requests("r", frontend)[0]
    assert (text.params.max_tokens, text.params.logprobs) == (16, 0)
    assert text.prompt_token_ids == tuple(frontend.tokenizer.encode("Hi"))
    nearly_full = parse_body(COMPLETIONS, {"prompt": [3] * 60}).to_requests("r", frontend)[0]
    assert nearly_full.params.max_tokens == 4


@pytest.mark.parametrize("prompt", [[3, 4], [[3, 4]]])
def test_a_prompt_may_be_ids(frontend: ModelFrontend, prompt: Any) -> None:
    body = parse_body(COMPLETIONS, {"prompt": prompt})
    assert body.to_requests("r", frontend)[0].prompt_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("url", "change", "field", "words"),
    [
        (CHAT, {"n": 0}, "n", "n is 0; it must be a whole number from 1 to 128"),
        (CHAT, {"n": True}, "n", "n is true"),
        (
            CHAT,
            {"best_of": 2},
            "best_of",
            "best_of is 2, which is not supported; leave it out or use 1",
        ),
        (CHAT, {"best_of": True}, "best_of", "parameter best_of is true"),
        (CHAT, {"frequency_penalty": 2.5}, "frequency_penalty", "is 2.5; it must be a number from -2 to 2"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "token ids with numbers"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        (CHAT, {"logit_bias": {"6144": 1}}, "logit_bias", "holds 6144"),
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens 8"),
        (CHAT, {"bad_words": [" "]}, "bad_words", "none of them blank"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "it must be from 0 to 20, the server's --max-logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1"),
        (CHAT, {"stream": True}, "stream", "not supported"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
        (COMPLETIONS, {"tools": [5]}, "tools", "not supported"),
        (CHAT, {"response_format": "json"}, "response_format", "one of text, json_object, json_schema"),
        (
            CHAT,
            {"response_format": {"type": "xml"}},
            "response_format",
            "one of text, json_object, json_schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema",
            "holds 'schema'; it may hold type",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
            'an object with "name" and "schema"',
        ),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "strict": 1},
                }
            },
            "response_format.json_schema.strict",
            "strict is 1; it must be true or false",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
            "guided_regex",
            "response_format and guided_regex both say what the text must look like",
        ),
        (
            CHAT,
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "holds 2 constraints",
        ),
        (
            CHAT,
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "no kind of constraint",
        ),
        (CHAT, {"guided_choice": "ab"}, "guided_choice", "choice that is no list of texts"),
        (CHAT, {"guided_regex": "a("}, "guided_regex", "The parenthesis is not closed"),
        (
            CHAT,
            {"guided_json": {"type": "array", "items": {"not": {}}}},
            "guided_json",
            "guided_json holds a json that cannot be enforced: not is not enforced; write the schema without",
        ),
        (COMPLETIONS, {"stream_options": {"a": 1}}, "stream_options", "not supported; leave it out"),
        (CHAT, {"temprature": 1}, "temprature", "unknown; did you mean temperature?"),
        (CHAT, {"prompt": "x"}, "prompt", "parameter prompt is unknown"),
        (CHAT, {"user": 5}, "user", "user is 5; it must be text"),
        (CHAT, {"metadata": "x"}, "metadata", "must be an object"),
        (CHAT, {"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs", "does not read"),
        (CHAT, {"top_a": 1}, "top_a", "parameter top_a is unknown"),
        (CHAT, {"input": "x"}, "input", "did you mean messages?"),
        (COMPLETIONS, {"messages": []}, "messages", "did you mean prompt?"),
        (
            CHAT,
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
            "max_tokens and max_completion_tokens both say",
        ),
        (CHAT, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "an object of at most 4096 token ids"),
        (CHAT, {"logit_bias": {"05": 2}}, "logit_bias", "token ids"),
        (CHAT, {"logit_bias": {"٥": 2}}, "logit_bias", "token ids"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice", "tool_choice is 'auto' without tools"),
        (CHAT, {"tool_choice": "auto", "tools": []}, "tool_choice", "without tools"),
        (CHAT, {"parallel_tool_calls": True}, "parallel_tool_calls", "without tools"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; it must be"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs", "logprobs is 21"),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"not": {}}},
                }
            },
            "response_format.json_schema.schema",
            "response_format.json_schema.schema holds a json that cannot be enforced",
        ),
        (CHAT, {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "not closed"),
        (
            CHAT,
            {"response_format": {"type": "structural_tag", "format": {}, "x": 1}},
            "response_format.x",
            "holds 'x'",
        ),
        (CHAT, {"messages": None}, "messages", "messages is null; it must be a list"),
        (CHAT, {"messages": [None]}, "messages[0]", "messages[0] is null; it must be an object"),
        (CHAT, {"messages": {"role": "user"}}, "messages", "it must be a list"),
        (CHAT, {"model": 5}, "model", "model is 5; it must be text"),
        (CHAT, {"logprobs": "yes"}, "logprobs", "logprobs is 'yes'; it must be true or false"),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs", "it must be an object"),
        (CHAT, {"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]", "[0] is null"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a\ud800"}]},
            "messages[0].content",
            "messages[0].content holds '\\ud800' at character 1, half of a surrogate pair",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "name": "\ud800", "content": "a"}]},
            "messages[0].name",
            "half of a surrogate pair",
        ),
        (CHAT, {"metadata": {"a": [{}, "\ud800"]}}, "metadata.a[1]", "metadata.a[1] holds '\\ud800'"),
        (CHAT, {"metadata": {"a": [{"\udfff": 1}]}}, "metadata.a[0]", "a name with half of a surrogate"),
        (CHAT, {"user": "\ud800"}, "user", "half of a surrogate pair"),
        (CHAT, {"stop": ["a", "\ud800"]}, "stop[1]", "half of a surrogate pair"),
        (CHAT, {"tools": [{"function": {"description": "\ud800"}}]}, "tools[0].function.description", "half"),
        (
            CHAT,
            {"chat_template_kwargs": {"a": "\ud800"}},
            "chat_template_kwargs.a",
            "half of a surrogate pair",
        ),
        (COMPLETIONS, {"cache_salt": "\ud800"}, "cache_salt", "half of a surrogate pair"),
        (COMPLETIONS, {"\ud800": None}, "body", "half of a surrogate pair"),
        (CHAT, {"temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        (CHAT, {"temperature": -1}, "temperature", "from 0 (greedy)"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": "all"}, "top_logprobs", "top_logprobs is 'all'"),
        (CHAT, {"stop": 5}, "stop", "stop is 5"),
        (CHAT, {"ignore_eos": "yes"}, "ignore_eos", "ignore_eos is 'yes'"),
        (
            CHAT,
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens is 0; it must be",
        ),
        (CHAT, {"max_tokens": 64}, "max_tokens", "max_tokens is 64; the prompt has"),
        (CHAT, {"max_completion_tokens": 64}, "max_completion_tokens", "max_completion_tokens is 64; the"),
        (COMPLETIONS, {"max_tokens": 64}, "max_tokens", "max_tokens is 64; the prompt has"),
        (COMPLETIONS, {"detokenize": False}, "detokenize", "parameter detokenize is unknown"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt", "holds 1025 prompts; send at most 1024"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]", "prompt[1] is 5; it must be text or a list"),
        (COMPLETIONS, {"prompt": [[3], [9999]]}, "prompt[1]", "prompt 1: prompt holds 9999"),
        (COMPLETIONS, {"prompt": [[9999]]}, "prompt[0]", "prompt 0: prompt holds 9999"),
        (COMPLETIONS, {"prompt": [""]}, "prompt[0]", "prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "prompt is empty"),
        (CHAT, {"structured_outputs": []}, "structured_outputs", "exactly one of"),
        (CHAT, {"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "no text with characters"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "that is not JSON"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "no list of texts"),
        (
            CHAT,
            {"structured_outputs": {"regex": "a", "x": 1}},
            "structured_outputs.x",
            "no kind of constraint",
        ),
        (CHAT, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "2 constraints"),
        (
            COMPLETIONS,
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens is 0; it must be",
        ),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "suffix is 'x', which is not supported"),
        (CHAT, {"echo": True}, "echo", "parameter echo is unknown"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "of role 'user'"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both true",
        ),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "must be text, a list of token ids, or a list of such"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt", "holds 9999"),
    ],
)
def test_what_cannot_be_done_is_named(
    frontend: ModelFrontend, url: str, change: dict[str, Any], field: str, words: str
) -> None:
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "Hi"}
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(url, body | change).to_requests("r", frontend)[0]
    assert words in str(caught.value)
    assert caught.value.field == field


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ({"role": "user", "content": None}, "content", "content is null; it must be text"),
        ({"role": "user"}, "content", "content is null"),
        ({"role": "user", "content": []}, "content", "content is []"),
        ({"role": "system", "content": None}, "content", "content is null"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "content", "content is null"),
        ({"role": "assistant", "content": None}, "content", "or null where there are tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "content", "content is null"),
        ({"role": "assistant", "content": "x", "refusal": "y"}, "content", "beside a refusal"),
        ({"role": "user", "content": "x", "nmae": "y"}, "nmae", "a message of role user may hold role"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "is unknown"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id", "is unknown"),
        ({"role": "user", "content": "x", "name": 5}, "name", "name is 5; it must be text"),
        ({"role": "assistant", "audio": {"id": "a"}, "content": "x"}, "audio", "is unknown"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
            "content[0].cache_control",
            "it may hold type, text",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "text is null"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0]", "'refusal'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0]", "only text parts"),
        ({"role": "assistant", "tool_calls": [CALL | {"x": 1}]}, "tool_calls[0].x", "is unknown"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].type", "function"),
        ({"role": "assistant", "tool_calls": [CALL | {"id": 1}]}, "tool_calls[0].id", "must be text"),
        ({"role": "assistant", "tool_calls": [CALL | {"index": 1}]}, "tool_calls[0].index", "must be 0"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "args": {}}}]},
            "tool_calls[0].function.args",
            "it may hold name, arguments",
        ),
    ],
)
def test_what_a_message_cannot_hold_is_named(message: dict[str, Any], field: str, words: str) -> None:
    glm = chat_frontend(str(GLM))
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(CHAT, {"messages": [*MESSAGES, message]}).to_requests("r", glm)
    assert refused.value.field == f"messages[1].{field}"
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "", "name": "me"},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
        {"role": "assistant", "tool_calls": [CALL | {"index": 0}], "function_call": None, "annotations": []},
    ],
    ids=str,
)
def test_what_a_message_may_hold_is_taken(message: dict[str, Any]) -> None:
    glm = chat_frontend(str(GLM))
    [request] = parse_body(CHAT, {"messages": [*MESSAGES, message]}).to_requests("r", glm)
    prompt = glm.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert ("I will not." in prompt) == ("I will not." in str(message))


def test_a_field_that_the_template_reads_is_taken(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ m.get('mood') }}{{ m['of'] }}{% endfor %}")
    own = chat_frontend(str(template))
    message = MESSAGES[0] | {"mood": "glad", "of": "it"}
    [request] = parse_body(CHAT, {"messages": [message]}).to_requests("r", own)
    assert own.tokenizer.decode(request.prompt_token_ids).endswith("Higladit")
    for name in ("moo", "get", "it"):
        with pytest.raises(InvalidRequestError, match=f"messages.0..{name} is unknown"):
            parse_body(CHAT, {"messages": [message | {name: 1}]}).to_requests("r", own)


@pytest.mark.parametrize("name", ["a<b", "", " a", "a" * 257])
def test_a_property_that_a_form_of_calls_cannot_write_is_refused(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = parse_body(CHAT, {"messages": MESSAGES, "tools": tools})
    with pytest.raises(InvalidRequestError, match="rename it") as refused:
        body.to_requests("r", chat_frontend(str(GLM)))
    assert refused.value.field == "tools[0].function.parameters.properties"
    assert body.to_requests("r", chat_frontend(str(GLM), tool_call_parser="deepseek_v31"))


def test_rules_of_a_body(frontend: ModelFrontend) -> None:
    rules = {
        "n": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [5, 6, 7],
    }
    body = parse_body(CHAT, {"messages": MESSAGES, "logit_bias": {"5": -1}, "bad_words": "no"} | rules)
    request = body.to_requests("r", frontend)[0]
    for name, value in rules.items():
        assert getattr(request.params, name) == (tuple(value) if isinstance(value, list) else value)
    assert request.params.logit_bias == {5: -1}
    tokenizer = frontend.tokenizer
    assert request.bad_words == tuple(
        tuple(tokenizer.encode(word, add_special_tokens=False)) for word in ("no", " no")
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
TAGGED = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [TAG]},
}


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": TAGGED}, {"structural_tag": TAGGED}),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                    "triggers": ["<f>"],
                }
            },
            {"structural_tag": TAGGED},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
    ],
    ids=str,
)
def test_every_spelling_of_a_constraint_is_one(
    frontend: ModelFrontend, change: dict[str, Any], asked: dict[str, Any] | None
) -> None:
    for url, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})):
        [request] = parse_body(url, body | change).to_requests("r", frontend)
        constraint = request.params.structured_outputs
        assert constraint == (None if asked is None else StructuredOutputs.of(**asked))


def test_what_a_body_needs_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="messages is missing; /v1/chat/completions needs it"):
        parse_body(CHAT, {})


def test_another_model_is_refused(frontend: ModelFrontend) -> None:
    check_model(parse_body(CHAT, {"messages": MESSAGES, "model": "tiny-dsa"}).model, frontend)
    with pytest.raises(InvalidRequestError, match="model is 'gpt'; the model served here is 'tiny-dsa'"):
        check_model(parse_body(CHAT, {"messages": MESSAGES, "model": "gpt"}).model, frontend)


LONG = "x" * 300_000


@pytest.mark.parametrize(
    "body",
    [
        {LONG: 1},
        {"suffix": LONG},
        {"tools": [LONG]},
        {"response_format": {"type": LONG}},
        {"stream": LONG},
        {"model": LONG},
        {"max_tokens": LONG},
        {"stop": [LONG]},
        {"logit_bias": {LONG: 1}},
        {"chat_template_kwargs": {"messages" + LONG: 1, LONG: {1}}},
        {"top_logprobs": LONG},
        {"messages": LONG},
        {"messages": [LONG]},
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [{"role": "user", "content": {"a": LONG}}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"messages": [{"role": "assistant", "tool_calls": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [LONG]}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{" + LONG}}]}
            ]
        },
    ],
    ids=lambda body: str(body)[:60],
)
def test_a_refusal_never_sends_the_body_back(frontend: ModelFrontend, body: dict[str, Any]) -> None:
    def read() -> None:
        parsed = parse_body(CHAT, {"messages": MESSAGES} | body, may_stream=True)
        check_model(parsed.model, frontend)
        parsed.to_requests("id", frontend)[0]

    with pytest.raises(InvalidRequestError) as refused:
        read()
    assert len(str(refused.value)) < 1000
    assert len(refused.value.field or "") < 1000


def test_each_of_several_prompts_is_a_request(frontend: ModelFrontend) -> None:
    for prompts in (["Hi", "The SELECT statement"], [[3, 4], [5]], ["Hi", [5]]):
        requests = parse_body(COMPLETIONS, {"prompt": prompts, "seed": 3}).to_requests("r", frontend)
        expected = [
            parse_body(COMPLETIONS, {"prompt": one, "seed": 3}).to_requests("r", frontend)[0]
            for one in prompts
        ]
        assert requests == expected


def test_an_echo_of_log_probabilities_needs_those_of_the_prompt(frontend: ModelFrontend) -> None:
    body = {"prompt": "Hi", "echo": True, "logprobs": 2, "max_tokens": 0}
    [request] = parse_body(COMPLETIONS, body).to_requests("r", frontend)
    assert (request.params.prompt_logprobs, request.params.max_tokens) == (2, 1)


def test_the_model_goes_on_with_the_last_message(frontend: ModelFrontend) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    [request] = parse_body(CHAT, {"messages": begun, "continue_final_message": True}).to_requests(
        "r", frontend
    )
    opened = frontend.render_chat(MESSAGES)
    assert frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == (
        frontend.tokenizer.decode(opened, skip_special_tokens=False) + "Well, "
    )


def test_prompt_logprobs_have_no_place_in_a_stream(frontend: ModelFrontend) -> None:
    body = parse_body(COMPLETIONS, {"prompt": "Hi", "prompt_logprobs": 1, "stream": True}, may_stream=True)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is 1 with stream") as refused:
        body.to_requests("r", frontend)
    assert refused.value.field == "prompt_logprobs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "thoughts"),
    [("<think>\n", "open"), ("<think>\n</think>", "over"), ("", "optional")],
    ids=["thinks", "does not", "says nothing"],
)
def test_a_format_is_the_answers_and_not_its_thoughts(tmp_path: Path, prefix: str, thoughts: str) -> None:
    """A prompt that opens thoughts lets the model end them; `tests/unit/grammar` holds what follows."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{# </think> #}" + prefix)
    thinking = chat_frontend(str(template), reasoning_parser="deepseek_r1")
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    [request] = parse_body(CHAT, body).to_requests("r", thinking)
    plain, constraint = StructuredOutputs("json_object"), request.params.structured_outputs
    assert constraint is not None
    if thoughts == "optional":
        first, answer = json.loads(constraint.text)["format"]["elements"]
        assert (first["type"], first["content"]["begin"]) == ("optional", "<think>")
        assert answer == plain.as_format()
    else:
        assert constraint == (plain.behind("</think>") if thoughts == "open" else plain)


def test_a_demand_that_is_too_long_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{# </think> #}")
    thinking = chat_frontend(str(template), reasoning_parser="deepseek_r1")
    body = {"messages": MESSAGES, "guided_json": {"const": "a" * (MAX_LENGTH - 40)}}
    with pytest.raises(InvalidRequestError, match=r"structural_tag of \d+ characters, which may have"):
        parse_body(CHAT, body).to_requests("r", thinking)
