"""The body of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from pydantic import StrictBool

from actors.parameter_kinds import is_whole
from actors.requests import Request
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.sampling_body import SamplingBody
from kernels_integration.errors import InvalidRequestError, shown

MAX_PROMPTS = 1024
"""In one body."""
DEFAULT_MAX_TOKENS = 16


class CompletionsBody(SamplingBody):
    """One or several prompts, each text or token ids.

    echo: the prompt stands before the completion, and before its log probabilities; with max_tokens 0 it
    stands alone.
    """

    prompt: Any
    logprobs: Any = None
    echo: StrictBool | None = None

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether nothing shall be completed. A token is drawn all the same, and not shown."""
        most = self.given_parameters.get("max_tokens")
        return bool(self.echo) and is_whole(most) and most == 0

    def own_names(self) -> dict[str, str]:
        echoes = bool(self.echo) and self.logprobs is not None
        return super().own_names() | ({"prompt_logprobs": "logprobs"} if echoes else {})

    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts, each not looked into yet. Errors: InvalidRequestError."""
        prompt = self.prompt
        if not isinstance(prompt, str | list):
            raise InvalidRequestError(
                f"prompt is {shown(prompt)}; it must be text, a list of token ids, or a list of such prompts",
                field="prompt",
            )
        if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], str | list):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt holds {len(prompt)} prompts; send at most {MAX_PROMPTS} in a request", field="prompt"
            )
        for index, one in enumerate(prompt):
            if not isinstance(one, str | list):
                raise InvalidRequestError(
                    f"prompt[{index}] is {shown(one)}; it must be text or a list of token ids",
                    field=f"prompt[{index}]",
                )
        return prompt

    def to_requests(self, request_id: str, frontend: ModelFrontend) -> list[Request]:
        """One for each prompt, all of this id. Errors: InvalidRequestError."""
        own = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            own["prompt_logprobs"] = self.logprobs
        if self.wants_prompt_alone:
            own["max_tokens"] = 1
        prompts = self.prompts()
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(
                    self.build_request(
                        request_id, frontend, prompt, default_max_tokens=DEFAULT_MAX_TOKENS, **own
                    )
                )
            except InvalidRequestError as error:
                if prompts == [self.prompt] or error.field != "prompt":
                    raise
                raise InvalidRequestError(f"prompt {index}: {error}", field=f"prompt[{index}]") from error
        return requests
