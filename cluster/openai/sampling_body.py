"""What the bodies of all endpoints share: the model, how to draw, and how to stream."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, StrictBool

from actors.requests import Request
from actors.sampling_params import PARAMETERS, SamplingParams
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.constraints import GUIDED, Constraint, constraint_of
from kernels_integration.errors import InvalidRequestError

OPENAI_PARAMETERS = frozenset(name for name, row in PARAMETERS.items() if row.openai)
"""Sampling parameters that bodies have under their own names."""


class StreamOptions(BaseModel):
    """What a stream brings beside its tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    include_usage: StrictBool | None = None
    include_obfuscation: Literal[False] | None = None
    """Padding against eavesdroppers, which nobody has here."""


def in_words_of(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error by the name that its sender has for the field."""
    field = error.field
    if field not in names:
        return error
    words = re.sub(rf"^{re.escape(field)}(?= (is|holds)\b)", names[field], str(error))
    return type(error)(words, field=names[field])


class SamplingBody(BaseModel):
    """Beside these fields, every sampling parameter under its own name.

    Values of parameters are checked by SamplingParams; null means not given.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    not_taken: ClassVar[frozenset[str]] = frozenset()
    """Fields and parameters that the endpoint has no place for, or another name."""

    model: str | None = None
    priority: Any = None
    cache_salt: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def given_parameters(self) -> dict[str, Any]:
        """Sampling parameters that the body gives."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in OPENAI_PARAMETERS if extra.get(name) is not None}

    @property
    def constraint(self) -> Constraint | None:
        """What the text must look like, in whichever spelling. Errors: InvalidRequestError."""
        asked = {name: getattr(self, name) for name in ("response_format", *GUIDED)}
        return constraint_of(asked | {"structured_outputs": self.given_parameters.get("structured_outputs")})

    @property
    def skips_special_tokens(self) -> bool:
        """Whether special tokens are left out of the text."""
        return self.given_parameters.get("skip_special_tokens") is not False

    def build_request(
        self,
        request_id: str,
        frontend: ModelFrontend,
        prompt: str | Sequence[int],
        *,
        default_max_tokens: int | None,
        **own: Any,
    ) -> Request:
        """The checkpoint's defaults, overridden by what the body gives. own: the endpoint's own spellings.

        Errors: InvalidRequestError, by the names that the body has for parameters.
        """
        try:
            return self._built(request_id, frontend, prompt, default_max_tokens, own)
        except InvalidRequestError as error:
            raise in_words_of(error, self.own_names()) from error

    def own_names(self) -> dict[str, str]:
        """What the body calls parameters that it gives under another name."""
        constraint = self.constraint
        return {} if constraint is None else {"structured_outputs": constraint.field}

    def _built(
        self,
        request_id: str,
        frontend: ModelFrontend,
        prompt: str | Sequence[int],
        default_max_tokens: int | None,
        own: dict[str, Any],
    ) -> Request:
        defaults = dict(frontend.default_sampling_params)
        most = defaults.pop("max_tokens", default_max_tokens)
        constraint = self.constraint
        if constraint is not None:
            own.setdefault("structured_outputs", constraint.asked)
        own = {name: value for name, value in own.items() if value is not None}
        params = SamplingParams(**{"max_tokens": None} | defaults | self.given_parameters | own)
        if self.stream and params.prompt_logprobs is not None and "prompt_logprobs" not in own:
            raise InvalidRequestError(
                f"prompt_logprobs is {params.prompt_logprobs} with stream, whose chunks have no place for "
                "them; leave out one of the two",
                field="prompt_logprobs",
            )
        return frontend.build_request(
            request_id,
            prompt,
            params,
            priority=0 if self.priority is None else self.priority,
            cache_salt=self.cache_salt,
            default_max_tokens=None if most is None else int(most),
        )
