"""Bodies of /v1/chat/completions and /v1/completions, read strictly: what is not supported is named.

A parameter that another server would understand and this one does not is an error, never ignored,
unless its value asks for nothing ("best_of": 1, "stream": false).
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, StrictBool, ValidationError

from actors.requests import Request
from actors.sampling_params import SamplingParams
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import InvalidRequestError

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

_NO_EFFECT = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Parameters that never change an answer."""


class Body(Protocol):
    """A request body, whichever its endpoint."""

    model: str | None

    def to_request(self, request_id: str, frontend: ModelFrontend) -> Request: ...


class _SamplingBody(BaseModel):
    """What both endpoints share. Values are checked by SamplingParams; None means not given."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    n: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[Any] | None = None
    bad_words: str | list[str] | None = None
    prompt_logprobs: Any = None
    seed: Any = None
    max_tokens: Any = None
    min_tokens: Any = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    priority: Any = None
    cache_salt: Any = None

    def sampling_params(
        self, frontend: ModelFrontend, *, default_max_tokens: int | None, **more: Any
    ) -> SamplingParams:
        """The checkpoint's defaults, overridden by what the body gives."""
        names = SamplingParams.__struct_fields__
        given = {name: getattr(self, name, None) for name in names if name != "logprobs"} | more
        values: dict[str, Any] = {"max_tokens": default_max_tokens} | frontend.default_sampling_params
        return SamplingParams(**values | {name: v for name, v in given.items() if v is not None})

    def build_request(
        self, request_id: str, frontend: ModelFrontend, prompt: str | Sequence[int], params: SamplingParams
    ) -> Request:
        priority = 0 if self.priority is None else self.priority
        return frontend.build_request(
            request_id, prompt, params, priority=priority, cache_salt=self.cache_salt
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
                f"top_logprobs is {self.top_logprobs!r} without logprobs; set logprobs to true",
                field="top_logprobs",
            )
        prompt = frontend.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        params = self.sampling_params(
            frontend,
            default_max_tokens=None,
            max_tokens=limit,
            logprobs=(0 if self.top_logprobs is None else self.top_logprobs) if self.logprobs else None,
        )
        return self.build_request(request_id, frontend, prompt, params)


class CompletionsBody(_SamplingBody):
    """The body of /v1/completions, with one prompt: text or token ids."""

    prompt: Any
    logprobs: Any = None

    def to_request(self, request_id: str, frontend: ModelFrontend) -> Request:
        """Errors: InvalidRequestError."""
        params = self.sampling_params(frontend, default_max_tokens=16, logprobs=self.logprobs)
        return self.build_request(request_id, frontend, self._one_prompt(), params)

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
                f"prompt is {prompt!r}; it must be text or a list of token ids", field="prompt"
            )
        return prompt


Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: Mapping[str, type[ChatBody] | type[CompletionsBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionsBody,
}


def parse_body(url: str, body: Mapping[str, Any]) -> ChatBody | CompletionsBody:
    """The body of a request to `url`, which is one of ENDPOINTS.

    Errors: InvalidRequestError naming the parameter.
    """
    cls = ENDPOINTS[url]
    for name, value in body.items():
        if name not in cls.model_fields and name not in _NO_EFFECT and value is not None:
            _check_unsupported(cls, name, value)
    try:
        return cls.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][:1]))
        if first["type"] == "missing":
            raise InvalidRequestError(f"{field} is missing; {url} needs it", field=field) from error
        raise InvalidRequestError(f"{field} is {body[field]!r}; {first['msg']}", field=field) from error


def check_model(body: Body, frontend: ModelFrontend) -> None:
    """Errors: InvalidRequestError when the body asks for another model. No model means this one."""
    if body.model is not None and body.model != frontend.served_model_name:
        raise InvalidRequestError(
            f"model is {body.model!r}; the model served here is {frontend.served_model_name!r}", field="model"
        )


def _check_unsupported(cls: type[BaseModel], name: str, value: object) -> None:
    if name not in _NEUTRAL:
        close = get_close_matches(name, cls.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidRequestError(f"parameter {name} is unknown{hint}", field=name)
    # type() keeps true from passing for 1
    if not any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL[name]
    ):
        neutral = " or ".join(repr(v) for v in _NEUTRAL[name])
        rule = f"leave it out or use {neutral}" if neutral else "leave it out"
        raise InvalidRequestError(
            f"parameter {name} is {value!r}, which is not supported; {rule}", field=name
        )
