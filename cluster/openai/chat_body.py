"""The body of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import StrictBool

from actors.requests import Request
from actors.structured_outputs import StructuredOutputs
from cluster.chat.answer_grammar import held_answer
from cluster.chat.answer_reader import AnswerReader
from cluster.chat.reasoning import END_OF_PROMPT, opens_thoughts
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.json_schema import passed_over
from cluster.openai.sampling_body import SamplingBody
from cluster.openai.tools import checked_tools, demanded_tools, shows_tools
from kernels_integration.errors import InvalidRequestError, shown


class ChatBody(SamplingBody):
    """Messages, and how the model's template shall show them.

    tools: a model that may call none (tool_choice "none") is not shown them. Where tool_choice demands calls,
    or response_format a form, the answer is held to that by a grammar, from the end of its thoughts on.
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
        if self.max_completion_tokens is not None and self.given_parameters.get("max_tokens") is not None:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens both say how long the answer may be; send one of them",
                field="max_tokens",
            )
        if self.parallel_tool_calls is not None and not self.tools:
            raise InvalidRequestError(
                f"parallel_tool_calls is {shown(self.parallel_tool_calls)} without tools; give tools, or "
                "leave it out",
                field="parallel_tool_calls",
            )
        prompt = self.prompt_ids(frontend)
        own = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            own["max_tokens"] = self.max_completion_tokens
        if frontend.answer_form.has_special_marks:
            own["skip_special_tokens"] = False  # else the text would lack what tells its parts
        demanded = demanded_tools(self.tool_choice, checked_tools(self.tools, frontend))
        own["structured_outputs"] = self._held_answer(frontend, prompt, demanded)
        try:
            return [self.build_request(request_id, frontend, prompt, default_max_tokens=None, **own)]
        except InvalidRequestError as error:
            told = self._about_tools(error, demanded, frontend)
            if told is error:
                raise
            raise told from error

    def _about_tools(
        self, error: InvalidRequestError, demanded: Sequence[Mapping[str, Any]], frontend: ModelFrontend
    ) -> InvalidRequestError:
        """The error; one about what the answer is held to is told of the tool that it comes from."""
        constraint = self.constraint
        if error.field != ("structured_outputs" if constraint is None else constraint.field):
            return error
        why = "tool_choice demands calls of tools: " if demanded else ""
        for tool in demanded or self.shown_tools(frontend) or ():
            if problem := passed_over(tool["function"].get("parameters")):
                index = next(i for i, given in enumerate(self.tools) if given is tool)
                field = f"tools[{index}].function.parameters"
                return InvalidRequestError(f"{why}{field} cannot be enforced: {problem}", field=field)
        return InvalidRequestError(f"{why}{error}", field="tools") if demanded else error

    def own_names(self) -> dict[str, str]:
        names = super().own_names() | {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names

    def _held_answer(
        self, frontend: ModelFrontend, prompt: Sequence[int], demanded: Sequence[Mapping[str, Any]]
    ) -> StructuredOutputs | None:
        """What the answer is held to. demanded: tools of which one must be called."""
        content = self.constraint
        if demanded and content is not None:
            raise InvalidRequestError(
                "tool_choice demands calls of tools, and response_format says what a text must look like; "
                "send one of them",
                field="tool_choice",
            )
        callable_tools = demanded or (self.shown_tools(frontend) if content is not None else None) or ()
        return held_answer(
            frontend.answer_form,
            _end_of(prompt, frontend),
            calls=callable_tools,
            content=None if content is None else content.asked,
            one_call=self.parallel_tool_calls is False or _is_named(self.tool_choice),
        )

    def prompt_ids(self, frontend: ModelFrontend, *, add_special_tokens: bool = False) -> list[int]:
        """The prompt that the model's template makes of the messages. add_special_tokens: see render_chat.

        Errors: InvalidRequestError.
        """
        return frontend.render_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            tools=self.shown_tools(frontend),
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=add_special_tokens,
        )

    def shown_tools(self, frontend: ModelFrontend) -> list[Mapping[str, Any]] | None:
        """The tools that the model may call; None where it may call none. Errors: InvalidRequestError."""
        tools = checked_tools(self.tools, frontend)
        return tools if shows_tools(self.tool_choice, tools) else None

    def reader(self, frontend: ModelFrontend, prompt_token_ids: Sequence[int]) -> AnswerReader:
        """What reads an answer to the prompt that the body has made."""
        return AnswerReader(
            frontend.answer_form,
            opened=opens_thoughts(_end_of(prompt_token_ids, frontend)),
            tools=self.shown_tools(frontend),
            one_call=self.parallel_tool_calls is False,
        )


def _end_of(prompt: Sequence[int], frontend: ModelFrontend) -> str:
    return frontend.tokenizer.decode(prompt[-END_OF_PROMPT:], skip_special_tokens=False)


def _is_named(choice: object) -> bool:
    """Whether one tool must be called; that is one call, as with OpenAI."""
    return isinstance(choice, Mapping)
