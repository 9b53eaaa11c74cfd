"""A group that answers by script: each request plays a list of updates, waits and errors."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from actors.requests import Request, RequestUpdate, TokenLogprob
from actors.stats import GroupStats
from kernels_integration.errors import UnavailableError

Script = Sequence["RequestUpdate | asyncio.Event | BaseException"]


def update(request: Request, token_ids: Sequence[int], done: int = 0, **fields: object) -> RequestUpdate:
    """New tokens after `done` earlier ones, with totals that add up."""
    wanted = request.params.logprobs
    logprobs = () if wanted is None else tuple(logprob_of(t, wanted) for t in token_ids)
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=tuple(token_ids),
        logprobs=logprobs,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_completion_tokens=done + len(token_ids),
        **fields,  # type: ignore[arg-type]
    )


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple((token_id + i, -0.25 - i) for i in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.25, top=top)


def echo(request: Request) -> Script:
    """Three tokens a step, the prompt's own ids in order and over again, to max_tokens."""
    total = request.params.max_tokens or 8
    ids = [request.prompt_token_ids[i % len(request.prompt_token_ids)] for i in range(total)]
    steps = []
    for start in range(0, total, 3):
        last = start + 3 >= total
        steps.append(
            update(
                request,
                ids[start : start + 3],
                start,
                finish_reason="length" if last else None,
                num_draft_tokens=start,
                num_accepted_tokens=start // 2,
            )
        )
    return steps


class ScriptedGroup:
    """Implements the gateway's Group. `ended` tells what became of each request."""

    def __init__(self, script: Callable[[Request], Script] = echo) -> None:
        self.script = script
        self.healthy = True
        self.message = ""
        self.stats: GroupStats | None = GroupStats()
        self.requests: list[Request] = []
        self.ended: dict[str, str] = {}
        self.aborted: list[str] = []
        self.live: set[str] = set()

    async def generate(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        if not self.healthy:
            raise UnavailableError(self.message)
        self.requests.append(request)
        self.live.add(request.request_id)
        self.ended[request.request_id] = "aborted"
        try:
            for item in self.script(request):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, RequestUpdate):
                    if item.finish_reason is not None:
                        self.ended[request.request_id] = "finished"
                    yield item
                else:
                    self.ended[request.request_id] = "failed"
                    raise item
                await asyncio.sleep(0)
        finally:
            self.live.remove(request.request_id)

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition; a test that waits in vain fails here."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
