"""A group that answers by script: each request plays a list of updates, waits and errors."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from actors.requests import Request, RequestUpdate, SequenceKey, TokenLogprob
from actors.stats import GroupStats, PhaseTimes
from cluster.answering.group import Deliver
from kernels_integration.errors import UnavailableError

Script = Sequence["RequestUpdate | asyncio.Event | BaseException"]

PHASES = PhaseTimes(num_finished=1, queue_s=1.5, prefill_s=2.5, decode_s=3.5)


def update(request: Request, token_ids: Sequence[int], done: int = 0, **fields: object) -> RequestUpdate:
    """New tokens after `done` earlier ones, with totals that add up."""
    wanted = request.params.logprobs
    logprobs = () if wanted is None else tuple(logprob_of(t, wanted) for t in token_ids)
    return RequestUpdate(
        request_id=request.request_id,
        incarnation=request.incarnation,
        index=request.index,
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
                phases=PHASES if last else None,
            )
        )
    return steps


class ScriptedGroup:
    """Implements Group. `live` holds the ids of what runs, `ended` what became of each."""

    def __init__(self, script: Callable[[Request], Script] = echo) -> None:
        self.script = script
        self.healthy = True
        self.is_recovering = False
        self.message = ""
        self.stats: GroupStats | None = GroupStats()
        self.requests: list[Request] = []
        self.ended: dict[str, str] = {}
        self._tasks: dict[SequenceKey, asyncio.Task[None]] = {}

    @property
    def live(self) -> set[str]:
        return {key.request_id for key in self._tasks}

    def submit(self, request: Request, deliver: Deliver) -> None:
        if not self.healthy:
            raise UnavailableError(self.message)
        self.requests.append(request)
        self._tasks[request.key] = asyncio.create_task(self._play(request, deliver))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                self.ended[key.request_id] = "aborted"
                task.cancel()

    async def connect(self) -> None:
        pass

    async def _play(self, request: Request, deliver: Deliver) -> None:
        for item in self.script(request):
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, RequestUpdate) and item.finish_reason is None:
                deliver(item)
            else:
                self.ended[request.request_id] = "finished" if isinstance(item, RequestUpdate) else "failed"
                del self._tasks[request.key]
                deliver(item)  # type: ignore[arg-type]
                return
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition; a test that waits in vain fails here."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
