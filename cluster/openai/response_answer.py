"""An answer of /v1/responses: items of output, streamed as events or whole."""

import time
from collections.abc import Mapping
from typing import Any

from actors.requests import RequestUpdate
from cluster.chat.answer_parts import CallArguments, CallBegins, Content, Part, Reasoning
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.error_body import error_body
from cluster.openai.responses_body import ResponsesBody
from cluster.openai.usage import usage_of
from cluster.outputs import OutputBuilder
from kernels_integration.errors import LatentrayError

Event = dict[str, Any]

_INCOMPLETE = {"length": "max_output_tokens"}


class ResponseAnswer:
    """The events of one answer; what they build is the whole answer."""

    names_events = True

    def __init__(self, body: ResponsesBody, builder: OutputBuilder, frontend: ModelFrontend) -> None:
        """builder: of the one request; it may be whole already."""
        request = builder.request
        self._body = body
        self._request = request
        self._model = frontend.served_model_name
        self._frontend = frontend
        self._created_at = int(time.time())
        self._builder = builder
        self._reader = body.chat().reader(frontend, request.prompt_token_ids)
        self._output: list[dict[str, Any]] = []
        self._num_events = 0
        self._finish_reason: str | None = None

    def opening(self) -> list[Event]:
        response = self.response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(self, position: int, update: RequestUpdate) -> list[Event]:
        """The events of an update of the one request."""
        return self.take(self._builder.push(update), update.finish_reason)

    def take(self, text: str, finish_reason: str | None) -> list[Event]:
        """The events of a piece of the text, which is the last where there is a finish_reason."""
        parts = self._reader.push(text)
        if finish_reason is not None:
            self._finish_reason = finish_reason
            parts += self._reader.finish()
        events: list[Event] = []
        for part in parts:
            events += self._of_part(part)
        return events

    def closing(self) -> list[Event]:
        events = self._end_item()
        kind = "response.incomplete" if self._finish_reason in _INCOMPLETE else "response.completed"
        return [*events, self._event(kind, response=self.response())]

    def failed(self, error: LatentrayError) -> list[Event]:
        told = error_body(error)["error"]
        return [self._event("error", code=told["code"], message=told["message"], param=told["param"])]

    def response(self, status: str | None = None) -> dict[str, Any]:
        """The object as it is now. status: None: as the request has ended."""
        metadata = (self._body.model_extra or {}).get("metadata")
        body, params = self._body, self._request.params
        reason = _INCOMPLETE.get(self._finish_reason or "")
        if status is None:
            status = "incomplete" if reason else "completed"
        is_over = status != "in_progress"
        return {
            "id": f"resp_{self._request.request_id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if is_over and reason else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text,
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "background": False,
            "metadata": metadata if isinstance(metadata, Mapping) else {},
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._builder.output()], self._frontend)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _of_part(self, part: Part) -> list[Event]:
        match part:
            case CallBegins():
                call = {"type": "function_call", "name": part.name, "arguments": ""}
                return self._begin(call | {"call_id": self._item_id("call")})
            case CallArguments():
                self._output[-1]["arguments"] += part.text
                return [self._delta("response.function_call_arguments.delta", part.text)]
            case Content():
                return self._of_text("message", "output_text", part.text)
            case Reasoning():
                return self._of_text("reasoning", "reasoning_text", part.text)

    def _of_text(self, item: str, kind: str, text: str) -> list[Event]:
        events = []
        if (
            not self._output
            or self._output[-1]["type"] != item
            or self._output[-1]["status"] != "in_progress"
        ):
            own: dict[str, Any] = {"role": "assistant"} if item == "message" else {"summary": []}
            events = self._begin({"type": item} | own | {"content": []})
            part: dict[str, Any] = {"type": kind, "text": ""} | (
                {"annotations": []} if kind == "output_text" else {}
            )
            self._output[-1]["content"].append(part)
            events.append(self._placed("response.content_part.added", part=dict(part)))
        self._output[-1]["content"][0]["text"] += text
        return [*events, self._delta(f"response.{kind}.delta", text)]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        events = self._end_item()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        item = {"id": self._item_id(prefix), "status": "in_progress"} | item
        self._output.append(item)
        shown = dict(item) | ({"content": []} if "content" in item else {})
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)
        return [*events, added]

    def _end_item(self) -> list[Event]:
        """The events of the end of the item that has begun last, if it goes on."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return []
        item = self._output[-1]
        is_last = self._finish_reason is not None
        item["status"] = "incomplete" if is_last and self._finish_reason in _INCOMPLETE else "completed"
        if item["type"] == "function_call":
            events = [
                self._placed(
                    "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
                )
            ]
        else:
            [part] = item["content"]
            own: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            events = [
                self._placed(f"response.{part['type']}.done", content_index=0, text=part["text"], **own),
                self._placed("response.content_part.done", part=dict(part)),
            ]
        done = self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))
        return [*events, done]

    def _delta(self, kind: str, text: str) -> Event:
        own: dict[str, Any] = {} if "arguments" in kind else {"content_index": 0}
        own |= {"logprobs": []} if "output_text" in kind else {}
        return self._placed(kind, delta=text, **own)

    def _placed(self, kind: str, **fields: Any) -> Event:
        """An event of the item that has begun last."""
        if "part" in fields:
            fields["content_index"] = 0
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request.request_id}_{len(self._output)}"


def whole_response(body: ResponsesBody, builder: OutputBuilder, frontend: ModelFrontend) -> dict[str, Any]:
    """The answer to a body whose request has finished."""
    answer = ResponseAnswer(body, builder, frontend)
    completion = builder.completion(0)
    answer.take(completion.text, completion.finish_reason)
    answer.closing()
    return answer.response()
