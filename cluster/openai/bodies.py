"""Bodies of /v1/chat/completions and /v1/completions, read strictly: what is not supported is named.

A parameter that another server would understand and this one does not is an error, never ignored,
unless its value asks for nothing ("best_of": 1, "stream": false).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError

from actors.requests import Request
from actors.sampling_params import PARAMETERS, SamplingParams
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import InvalidRequestError, UnknownModelError, shortened, shown

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Parameters of OpenAI and vLLM that are not supported, and the values under which they ask for nothing."""

_STREAMING = frozenset({"stream", "stream_options"})

_NO_EFFECT = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Parameters that never change an answer."""

_PARAMETERS = frozenset(name for name, row in PARAMETERS.items() if row.openai)


class Body(Protocol):
    """A request body, whichever its endpoint."""

    model: str | None

    def to_request(self, request_id: str, frontend: ModelFrontend) -> Request: ...


class StreamOptions(BaseModel):
    """What a stream brings beside its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: StrictBool | None = None


class _SamplingBody(BaseModel):
    """What both endpoints share: beside these fields, every sampling parameter under its own name.

    Values of parameters are checked by SamplingParams; null means not given.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: str | None = None
    priority: Any = None
    cache_salt: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def build_request(
        self,
        request_id: str,
        frontend: ModelFrontend,
        prompt: str | Sequence[int],
        *,
        default_max_tokens: int | None,
        **own: Any,
    ) -> Request:
        """The checkpoint's defaults, overridden by what the body gives. own: the endpoint's own spellings."""
        defaults = dict(frontend.default_sampling_params)
        most = defaults.pop("max_tokens", default_max_tokens)
        given = {name: value for name, value in (self.model_extra or {}).items() if name in _PARAMETERS}
        given = {name: value for name, value in (given | own).items() if value is not None}
        params = SamplingParams(**{"max_tokens": None} | defaults | given)
        priority = 0 if self.priority is None else self.priority
        return frontend.build_request(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=self.cache_salt,
            default_max_tokens=None if most is None else int(most),
        )


class ChatBody(_SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: Any = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def to_request(self, request_id: str, frontend: ModelFrontend) -> Request:
        """Errors: InvalidRequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {shown(self.top_logprobs)} without logprobs; set logprobs to true",
                field="top_logprobs",
            )
        prompt = frontend.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        own = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        return self.build_request(request_id, frontend, prompt, default_max_tokens=None, **own)


class CompletionsBody(_SamplingBody):
    """The body of /v1/completions, with one prompt: text or token ids."""

    prompt: Any
    logprobs: Any = None

    def to_request(self, request_id: str, frontend: ModelFrontend) -> Request:
        """Errors: InvalidRequestError."""
        return self.build_request(
            request_id, frontend, self._one_prompt(), default_max_tokens=16, logprobs=self.logprobs
        )

    def _one_prompt(self) -> str | Sequence[int]:
        """A list of one text or of one list of ids means its only member."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise InvalidRequestError(
                    f"prompt holds {len(prompt)} prompts; send one in a request", field="prompt"
                )
            prompt = prompt[0]
        if not isinstance(prompt, str | list):
            raise InvalidRequestError(
                f"prompt is {shown(prompt)}; it must be text or a list of token ids", field="prompt"
            )
        return prompt


Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: Mapping[str, type[ChatBody] | type[CompletionsBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionsBody,
}


def parse_body(url: str, body: Mapping[str, Any], *, may_stream: bool = False) -> ChatBody | CompletionsBody:
    """The body of a request to `url`, which is one of ENDPOINTS. may_stream: its answer may come in pieces.

    Errors: InvalidRequestError naming the parameter.
    """
    cls = ENDPOINTS[url]
    legal = cls.model_fields.keys() | _PARAMETERS
    if not may_stream:
        legal -= _STREAMING
    for name, value in body.items():
        if name not in legal and name not in _NO_EFFECT and value is not None:
            _check_unsupported(legal, name, value)
    try:
        return cls.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        if first["type"] == "missing":
            raise InvalidRequestError(f"{field} is missing; {url} needs it", field=field) from error
        raise InvalidRequestError(f"{field} is {shown(body[field])}; {first['msg']}", field=field) from error


def check_model(body: Body, frontend: ModelFrontend) -> None:
    """Errors: UnknownModelError when the body asks for another model. No model means this one."""
    if body.model is not None and body.model != frontend.served_model_name:
        raise UnknownModelError(
            f"model is {shown(body.model)}; the model served here is {frontend.served_model_name!r}",
            field="model",
        )


def _check_unsupported(legal: Iterable[str], name: str, value: object) -> None:
    if name not in _NEUTRAL:
        close = get_close_matches(name, list(legal), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        name = shortened(name)
        raise InvalidRequestError(f"parameter {name} is unknown{hint}", field=name)
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
