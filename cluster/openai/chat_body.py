"""The body of /v1/chat/completions."""

from typing import Any

from pydantic import StrictBool

from actors.requests import Request
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.sampling_body import SamplingBody
from kernels_integration.errors import InvalidRequestError, shown


class ChatBody(SamplingBody):
    """Messages, and how the model's template shall show them."""

    messages: list[Any]
    max_completion_tokens: Any = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_requests(self, request_id: str, frontend: ModelFrontend) -> list[Request]:
        """The one. Errors: InvalidRequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {shown(self.top_logprobs)} without logprobs; set logprobs to true",
                field="top_logprobs",
            )
        prompt = self.prompt_ids(frontend)
        own = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        return [self.build_request(request_id, frontend, prompt, default_max_tokens=None, **own)]

    def prompt_ids(self, frontend: ModelFrontend) -> list[int]:
        """The prompt that the model's template makes of the messages. Errors: InvalidRequestError."""
        return frontend.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=self.chat_template_kwargs,
        )
