"""OpenAI bodies, read strictly."""

from typing import Any

import pytest

from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend import ModelFrontend
from cluster.openai.bodies import check_model, parse_body
from kernels_integration.errors import InvalidRequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


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
        "max_tokens": 3,
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
    params = parse_body(CHAT, body).to_request("r", frontend).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.logprobs) == (11, 9, 2)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (4,))
    assert params.ignore_eos
    assert not params.skip_special_tokens


def test_defaults_are_the_checkpoints_and_openais(frontend: ModelFrontend) -> None:
    chat = parse_body(CHAT, {"messages": MESSAGES}).to_request("r", frontend).params
    assert (chat.temperature, chat.top_p, chat.max_tokens, chat.logprobs) == (0.7, 0.9, None, None)
    text = parse_body(COMPLETIONS, {"prompt": "Hi", "logprobs": 0}).to_request("r", frontend)
    assert (text.params.max_tokens, text.params.logprobs) == (16, 0)
    assert text.prompt_token_ids == tuple(frontend.tokenizer.encode("Hi"))


@pytest.mark.parametrize("prompt", [[3, 4], [[3, 4]]])
def test_a_prompt_may_be_ids(frontend: ModelFrontend, prompt: Any) -> None:
    body = parse_body(COMPLETIONS, {"prompt": prompt})
    assert body.to_request("r", frontend).prompt_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("url", "change", "field", "words"),
    [
        (CHAT, {"n": 2}, "n", "parameter n is 2, which is not supported; leave it out or use 1"),
        (CHAT, {"n": True}, "n", "parameter n is True"),
        (CHAT, {"stream": True}, "stream", "not supported"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty", "not supported; leave it out or use 0"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (COMPLETIONS, {"stream_options": {"a": 1}}, "stream_options", "not supported; leave it out"),
        (CHAT, {"temprature": 1}, "temprature", "unknown; did you mean temperature?"),
        (CHAT, {"prompt": "x"}, "prompt", "parameter prompt is unknown"),
        (CHAT, {"messages": None}, "messages", "messages is None"),
        (CHAT, {"temperature": "hot"}, "temperature", "temperature is 'hot'; it must be a number"),
        (CHAT, {"temperature": -1}, "temperature", "from 0 (greedy)"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "without logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": "all"}, "logprobs", "logprobs is 'all'"),
        (CHAT, {"stop": 5}, "stop", "stop is 5"),
        (CHAT, {"ignore_eos": "yes"}, "ignore_eos", "ignore_eos is 'yes'"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt", "holds 2 prompts"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "must be text or a list of token ids"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt", "holds 9999"),
    ],
)
def test_what_cannot_be_done_is_named(
    frontend: ModelFrontend, url: str, change: dict[str, Any], field: str, words: str
) -> None:
    body = {"messages": MESSAGES} if url == CHAT else {"prompt": "Hi"}
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(url, body | change).to_request("r", frontend)
    assert words in str(caught.value)
    assert caught.value.field == field


def test_what_a_body_needs_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="messages is missing; /v1/chat/completions needs it"):
        parse_body(CHAT, {})


def test_another_model_is_refused(frontend: ModelFrontend) -> None:
    check_model(parse_body(CHAT, {"messages": MESSAGES, "model": "tiny-dsa"}), frontend)
    with pytest.raises(InvalidRequestError, match="model is 'gpt'; the model served here is 'tiny-dsa'"):
        check_model(parse_body(CHAT, {"messages": MESSAGES, "model": "gpt"}), frontend)
