"""A coordinator and a shard that follow a script: every request emits 0, 1, 2... up to max_tokens."""

import time
from collections.abc import Callable

import numpy as np

from actors.messages import StepInput, StepOutput
from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.sampling_params import SamplingParams
from actors.stats import GroupStats
from kernels_integration.errors import LatentrayError, OverloadedError, ProtocolError

NO_INTS = np.zeros(0, np.int32)
NO_BYTES = np.zeros(0, np.uint8)
NO_ROWS = np.zeros(1, np.int32)


def request(request_id: str, max_tokens: int = 3) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=max_tokens),
        seed=2**63 + 5,
        eos_token_ids=(0,),
    )


def step_input(step: int, epoch: int = 0, num_requests: int = 1) -> StepInput:
    ints = np.arange(num_requests, dtype=np.int32)
    ones = np.ones(num_requests, np.uint8)
    return StepInput(
        epoch=epoch, step=step, slot=ints, admission=ints, kind=ones, k=ones, fill=ones, start=ints,
        readonly=ones, ids=ints, ids_indptr=NO_ROWS, new_blocks=ints, new_blocks_indptr=NO_ROWS,
        accepted=ints, accepted_indptr=NO_ROWS,
    )  # fmt: skip


def step_output(step: int, epoch: int = 0, num_requests: int = 1) -> StepOutput:
    ints = np.arange(num_requests, dtype=np.int32)
    return StepOutput(epoch=epoch, step=step, drafts=ints, tokens=ints, length=ints)


class EchoShard:
    """Reports one token a request at once."""

    def __init__(self) -> None:
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        self.steps.append(step)
        report(step_output(step.step, step.epoch, len(step.slot)))

    def settle(self, *, wait: bool) -> bool:
        return True


class ScriptedCoordinator:
    """Submit, abort, one token a step, one step in flight. Refuses more than `capacity` requests."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.live: dict[SequenceKey, tuple[Request, int]] = {}
        self.aborted: list[str] = []
        self.step = 0
        self.is_in_flight = False
        self.sent_at_s = 0.0
        self.epoch = 0
        self._updates: list[RequestUpdate | RequestFailed] = []

    @property
    def step_age_s(self) -> float:
        return time.monotonic() - self.sent_at_s if self.is_in_flight else 0.0

    def blame(self) -> bool:
        return False

    def restart(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_in_flight = False

    def fail_all(self, error: LatentrayError) -> None:
        self.live.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def submit(self, request: Request) -> None:
        if len(self.live) >= self.capacity:
            raise OverloadedError("the queue is full")
        self.live[request.key] = (request, 0)

    def abort(self, keys: list[SequenceKey]) -> None:
        for key in keys:
            if self.live.pop(key, None) is not None:
                self.aborted.append(key.request_id)
                self._updates.append(RequestFailed.of(key, "aborted", "aborted"))

    def schedule(self) -> StepInput | None:
        if self.is_in_flight:
            return None
        self.is_in_flight = True
        self.sent_at_s = time.monotonic()
        self.step += 1
        return step_input(self.step, self.epoch, num_requests=len(self.live))

    def process(self, output: StepOutput) -> None:
        if not self.is_in_flight or output.step != self.step:
            raise ProtocolError(f"step {output.step} answers nothing")
        self.is_in_flight = False
        for key, (request, emitted) in list(self.live.items()):
            is_last = emitted + 1 == request.params.max_tokens
            self._updates.append(
                RequestUpdate(
                    request_id=key.request_id,
                    incarnation=key.incarnation,
                    index=key.index,
                    token_ids=(emitted,),
                    finish_reason="length" if is_last else None,
                    num_completion_tokens=emitted + 1,
                )
            )
            self.live[key] = (request, emitted + 1)
            if is_last:
                del self.live[key]

    def take_updates(self) -> list[RequestUpdate | RequestFailed]:
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> GroupStats:
        return GroupStats(running=len(self.live), num_steps=self.step)
