"""An Engine that answers by script, out of order, and counts what is in flight."""

from collections.abc import Callable, Iterable

from actors.requests import Request, RequestFailed, RequestUpdate, TokenLogprob
from actors.stats import GroupStats

Answer = tuple[int, ...] | RequestFailed


class ScriptedEngine:
    """`answer(request)` gives the completion's ids, or how it fails. The newest request ends first."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self._answer = answer
        self.live: dict[str, Request] = {}
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.most_in_flight = 0

    def submit(self, request: Request) -> None:
        self.live[request.request_id] = request
        self.submitted.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.live))

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    def updates(self) -> list[RequestUpdate | RequestFailed]:
        if not self.live:
            return []
        _, request = self.live.popitem()
        answer = self._answer(request)
        if isinstance(answer, RequestFailed):
            return [answer]
        logprobs = tuple(TokenLogprob(token_id=t, logprob=-0.5, top=((t, -0.5), (0, -1.0))) for t in answer)
        wanted = request.params.logprobs is not None
        first = RequestUpdate(
            request_id=request.request_id,
            token_ids=answer[:1],
            logprobs=logprobs[:1] if wanted else (),
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        last = RequestUpdate(
            request_id=request.request_id,
            token_ids=answer[1:],
            logprobs=logprobs[1:] if wanted else (),
            finish_reason="length",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_completion_tokens=len(answer),
            num_draft_tokens=6,
            num_accepted_tokens=4,
        )
        return [first, last]

    def stats(self) -> GroupStats:
        return GroupStats()

    def close(self) -> None:
        pass
