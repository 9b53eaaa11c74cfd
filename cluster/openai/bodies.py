"""Bodies of /v1/chat/completions and /v1/completions, read strictly: what is not supported is named.

A parameter that another server would understand and this one does not is an error, never ignored,
unless its value asks for nothing ("best_of": 1, "stream": false).
"""

import json
from collections import deque
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from actors.parameter_kinds import is_text
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.token_checks import require_text
from cluster.openai.chat_body import ChatBody
from cluster.openai.completions_body import CompletionsBody
from cluster.openai.responses_body import ResponsesBody
from cluster.openai.sampling_body import OPENAI_PARAMETERS, StreamOptions
from kernels_integration.errors import (
    InvalidRequestError,
    UnknownModelError,
    UnknownParameterError,
    shortened,
    shown,
)

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "n": (1,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "previous_response_id": (),
    "conversation": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
}
"""Parameters of OpenAI and vLLM that are not supported, and the values under which they ask for nothing."""

_OTHER_NAMES = {
    "prompt": ("messages", "input"),
    "input": ("messages", "prompt"),
    "messages": ("prompt", "input"),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_new_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "response_format": ("text",),
}
"""What other endpoints and servers call it, and what it may be here."""
_CLOSE = 0.85
"""Likeness of a slip of the pen: below lie other parameters, such as top_a beside top_p."""

_STREAMING = frozenset({"stream", "stream_options"})

NO_EFFECT: Mapping[str, tuple[type, str]] = {
    "metadata": (dict, "an object"),
    "prompt_cache_key": (str, "text"),
    "safety_identifier": (str, "text"),
    "store": (bool, "true or false"),
    "user": (str, "text"),
}
"""Parameters that never change an answer, and what they must be."""

_RULES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "int_type": "a whole number",
    "list_type": "a list",
    "literal_error": "false",
    "model_type": "an object",
    "string_type": "text",
}
"""What pydantic says in words of Python."""

TextBody = ChatBody | CompletionsBody
"""Of answers whose choices are texts or messages."""
Body = TextBody | ResponsesBody

ENDPOINTS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionsBody,
    "/v1/responses": ResponsesBody,
}


def parse_body(url: str, body: Mapping[str, Any], *, may_stream: bool = False) -> Body:
    """The body of a request to `url`, which is one of ENDPOINTS. may_stream: its answer may come in pieces.

    Errors: InvalidRequestError naming the parameter.
    """
    cls = ENDPOINTS[url]
    legal = (cls.model_fields.keys() | OPENAI_PARAMETERS) - cls.not_taken
    if not may_stream:
        legal -= _STREAMING
    for name, value in body.items():
        if value is None or name in legal:
            continue
        if name not in NO_EFFECT:
            _check_unsupported(legal, name, value)
            continue
        kind, rule = NO_EFFECT[name]
        if not isinstance(value, kind):
            raise InvalidRequestError(f"{name} is {shown(value)}; it must be {rule}", field=name)
    _require_texts(body)
    try:
        found = cls.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors()[0]
        path = _path(first["loc"])
        if first["type"] == "missing":
            raise InvalidRequestError(f"{path} is missing; {url} needs it", field=path) from error
        if first["type"] == "extra_forbidden":
            legal_options = ", ".join(StreamOptions.model_fields)
            raise UnknownParameterError(
                f"{path} is unknown; there are {legal_options}", field=path
            ) from error
        value, rule = shown(first["input"]), _RULES.get(first["type"], first["msg"])
        raise InvalidRequestError(f"{path} is {value}; it must be {rule}", field=path) from error
    if found.stream_options is not None and not found.stream:
        raise InvalidRequestError(
            "stream_options is given without stream; set stream to true, or leave it out",
            field="stream_options",
        )
    return found


def _require_texts(body: Mapping[str, Any]) -> None:
    """Errors: InvalidRequestError for half of a surrogate pair, wherever it stands: also what no model reads
    may be told again, and could not be written."""
    waiting: deque[tuple[tuple[int | str, ...], Any]] = deque([((), body)])
    while waiting:
        loc, value = waiting.popleft()
        if isinstance(value, str):
            require_text(value, _path(loc))
        elif isinstance(value, Mapping):
            if not all(map(is_text, value)):
                path = _path(loc) or "body"
                raise InvalidRequestError(
                    f"{path} holds a name with half of a surrogate pair; names must be text that UTF-8 can "
                    "carry: send whole characters",
                    field=path,
                )
            waiting.extend(((*loc, name), one) for name, one in value.items() if isinstance(one, _HOLD_TEXT))
        else:
            waiting.extend(((*loc, i), one) for i, one in enumerate(value) if isinstance(one, _HOLD_TEXT))


_HOLD_TEXT = (str, Mapping, list)


def check_model(model: object, frontend: ModelFrontend) -> None:
    """Errors: UnknownModelError when a body asks for another model. No model means this one."""
    if model is not None and model != frontend.served_model_name:
        raise UnknownModelError(
            f"model is {shown(model)}; the model served here is {frontend.served_model_name!r}",
            field="model",
        )


def _check_unsupported(legal: Collection[str], name: str, value: object) -> None:
    if name not in _NEUTRAL:
        meant = [other for other in _OTHER_NAMES.get(name, ()) if other in legal]
        close = meant or get_close_matches(name, legal, n=1, cutoff=_CLOSE)
        hint = f"; did you mean {close[0]}?" if close else ""
        name = shortened(name)
        raise UnknownParameterError(f"parameter {name} is unknown{hint}", field=name)
    # type() keeps true from passing for 1
    if not any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL[name]
    ):
        neutral = " or ".join(json.dumps(v) for v in _NEUTRAL[name])
        rule = f"leave it out or use {neutral}" if neutral else "leave it out"
        raise InvalidRequestError(
            f"parameter {name} is {shown(value)}, which is not supported; {rule}", field=name
        )


def _path(loc: tuple[int | str, ...]) -> str:
    """Where in the body, as messages[0].role."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{shortened(step)}" if path else shortened(step)
    return path
