"""A streamed answer: updates of the requests of one body in, OpenAI's chunks out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.requests import Request, RequestUpdate
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.answers import answer_usage
from cluster.openai.bodies import TextBody
from cluster.openai.chat_body import ChatBody
from cluster.openai.chat_message import Deltas
from cluster.openai.chunks import Chunks
from cluster.openai.completions_body import CompletionsBody
from cluster.openai.echo import echoed_prompt, without_tokens
from cluster.openai.error_body import error_body
from cluster.outputs import CompletionOutput, OutputBuilder
from kernels_integration.errors import LatentrayError


class StreamedAnswer:
    """Choices are counted through the requests. requests: those of the body, in their order."""

    names_events = False

    def __init__(self, body: TextBody, requests: Sequence[Request], frontend: ModelFrontend) -> None:
        self._body = body
        self._frontend = frontend
        self._builders = [OutputBuilder(request, frontend) for request in requests]
        self._num_choices = [request.params.n for request in requests]
        self._chunks = Chunks(
            body,
            requests[0].request_id,
            model=frontend.served_model_name,
            token_bytes=frontend.tokenizer.token_bytes,
            deltas=[
                Deltas(body.reader(frontend, request.prompt_token_ids))
                for request in requests
                for _ in range(request.params.n)
                if isinstance(body, ChatBody)
            ],
        )
        self._waiting: dict[int, list[CompletionOutput]] = {}
        """Parts of completions whose echoed prompt has not been shown, by the request's position."""
        if isinstance(body, CompletionsBody) and body.echo:
            self._waiting = {position: [] for position in range(len(requests))}

    def opening(self) -> list[dict[str, Any]]:
        """What comes before any token."""
        return self._chunks.opening(sum(self._num_choices))

    def push(self, position: int, update: RequestUpdate) -> list[dict[str, Any]]:
        """The chunks that an update of the request at this position makes."""
        builder = self._builders[position]
        part = builder.part(update, builder.push(update))
        if position not in self._waiting:
            return self._shown(position, part)
        assert isinstance(self._body, CompletionsBody)
        self._waiting[position].append(part)
        prompt = echoed_prompt(self._body, position, builder, self._frontend)
        if prompt is None:
            return []
        chunks = []
        for index in range(self._num_choices[position]):
            chunks += self._chunks.piece(replace(prompt, index=self._index(position, index)))
        for waiting in self._waiting.pop(position):
            chunks += self._shown(position, waiting)
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """What comes after all tokens."""
        if not self._body.wants_usage:
            return []
        results = [builder.output() for builder in self._builders]
        return self._chunks.usage(answer_usage(self._body, results, self._frontend))

    def failed(self, error: LatentrayError) -> list[dict[str, Any]]:
        """What comes instead, after an error."""
        return [error_body(error)]

    def _shown(self, position: int, part: CompletionOutput) -> list[dict[str, Any]]:
        if isinstance(self._body, CompletionsBody) and self._body.wants_prompt_alone:
            part = without_tokens(part)
        return self._chunks.piece(replace(part, index=self._index(position, part.index)))

    def _index(self, position: int, index: int) -> int:
        return sum(self._num_choices[:position]) + index
