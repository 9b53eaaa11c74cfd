"""An Engine that answers by script, out of order, and counts what is in flight."""

from collections.abc import Callable, Generator, Iterable

from actors.requests import Request, RequestUpdate, TokenLogprob
from kernels_integration.errors import LatentrayError

Answer = tuple[int, ...] | LatentrayError


class ScriptedEngine:
    """`answer(request)` gives the completion's ids, or how it fails. The newest request ends first."""

    def __init__(self, answer: Callable[[Request], Answer]) -> None:
        self._answer = answer
        self.live: dict[str, Request] = {}
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.most_in_flight = 0

    def run(
        self, requests: Iterable[Request | None], *, max_in_flight: int | None = None
    ) -> Generator[tuple[str, RequestUpdate | Exception], None, None]:
        source = iter(requests)
        try:
            while True:
                while max_in_flight is None or len(self.live) < max_in_flight:
                    request = next(source, None)
                    if request is None:
                        break
                    self.live[request.request_id] = request
                    self.submitted.append(request)
                    self.most_in_flight = max(self.most_in_flight, len(self.live))
                if not self.live:
                    return
                request_id, request = self.live.popitem()
                for update in self._updates(request):
                    yield request_id, update
        finally:
            self.aborted += self.live

    def _updates(self, request: Request) -> list[RequestUpdate | Exception]:
        answer = self._answer(request)
        if isinstance(answer, LatentrayError):
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
