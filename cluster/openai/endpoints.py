"""The answers of all endpoints."""

from collections.abc import Sequence
from typing import Any, Protocol

from actors.requests import Request, RequestUpdate
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.answers import answer_body
from cluster.openai.bodies import Body
from cluster.openai.response_answer import ResponseAnswer, whole_response
from cluster.openai.responses_body import ResponsesBody
from cluster.openai.stream import StreamedAnswer
from cluster.outputs import OutputBuilder
from kernels_integration.errors import LatentrayError


class AnswerStream(Protocol):
    """An answer in pieces, each a JSON object. Implementations: StreamedAnswer, ResponseAnswer."""

    names_events: bool
    """Whether each piece is an event of the name that it has as "type"; else [DONE] follows the last."""

    def opening(self) -> list[dict[str, Any]]:
        """What comes before any token."""

    def push(self, position: int, update: RequestUpdate) -> list[dict[str, Any]]:
        """What an update of the request at this position makes certain."""

    def closing(self) -> list[dict[str, Any]]:
        """What comes after all tokens."""

    def failed(self, error: LatentrayError) -> list[dict[str, Any]]:
        """What comes instead, after an error."""


def whole_answer(body: Body, outputs: Sequence[OutputBuilder], frontend: ModelFrontend) -> dict[str, Any]:
    """The answer to a body whose requests have finished, in the shape of its endpoint."""
    if isinstance(body, ResponsesBody):
        [builder] = outputs
        return whole_response(body, builder, frontend)
    return answer_body(body, outputs, frontend)


def streamed_answer(body: Body, requests: Sequence[Request], frontend: ModelFrontend) -> AnswerStream:
    """requests: those of the body, in their order."""
    if isinstance(body, ResponsesBody):
        [request] = requests
        return ResponseAnswer(body, OutputBuilder(request, frontend), frontend)
    return StreamedAnswer(body, requests, frontend)
