"""The body of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import StrictBool

from actors.requests import Request
from cluster.chat.answer_reader import AnswerReader
from cluster.chat.reasoning import END_OF_PROMPT, END_THINK, opens_thoughts
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.sampling_body import SamplingBody
from cluster.openai.tools import checked_tools, shows_tools
from kernels_integration.errors import InvalidRequestError, shown


class ChatBody(SamplingBody):
    """Messages, and how the model's template shall show them.

    tools: a model that may call none (tool_choice "none") is not shown them.
    parallel_tool_calls: without them the answer ends with its first call.
    """

    messages: list[Any]
    max_completion_tokens: Any = None
    logprobs: StrictBool | None = None
    top_logprobs: Any = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None

    def to_requests(self, request_id: str, frontend: ModelFrontend) -> list[Request]:
        """The one. Errors: InvalidRequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {shown(self.top_logprobs)} without logprobs; set logprobs to true",
                field="top_logprobs",
            )
        prompt = self.prompt_ids(frontend)
        own: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        constraint = self.constraint
        if constraint is not None and frontend.answer_form.thinks and self._opens_thoughts(frontend, prompt):
            constraint = constraint.behind(END_THINK)  # it is the answer's, not the thoughts'
        own["structured_outputs"] = constraint
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        if frontend.answer_form.has_special_marks:
            own["skip_special_tokens"] = False  # else the text would lack what tells its parts
        return [self.build_request(request_id, frontend, prompt, default_max_tokens=None, **own)]

    def prompt_ids(self, frontend: ModelFrontend) -> list[int]:
        """The prompt that the model's template makes of the messages. Errors: InvalidRequestError."""
        return frontend.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            tools=self.shown_tools(frontend),
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def shown_tools(self, frontend: ModelFrontend) -> list[Mapping[str, Any]] | None:
        """The tools that the model may call; None where it may call none. Errors: InvalidRequestError."""
        tools = checked_tools(self.tools, frontend)
        return tools if shows_tools(self.tool_choice, tools) else None

    def reader(self, frontend: ModelFrontend, prompt_token_ids: Sequence[int]) -> AnswerReader:
        """What reads an answer to the prompt that the body has made."""
        return AnswerReader(
            frontend.answer_form,
            opened=self._opens_thoughts(frontend, prompt_token_ids),
            tools=self.shown_tools(frontend),
            one_call=self.parallel_tool_calls is False,
        )

    def _opens_thoughts(self, frontend: ModelFrontend, prompt_token_ids: Sequence[int]) -> bool:
        end = frontend.tokenizer.decode(prompt_token_ids[-END_OF_PROMPT:], skip_special_tokens=False)
        return opens_thoughts(end)
