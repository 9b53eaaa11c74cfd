"""A schedule as the message that every shard gets (contracts/mtp.md 7)."""

from collections.abc import Iterable
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from actors.coordinator.request_state import RequestState
from actors.coordinator.sampling_spec import sampling_spec
from actors.coordinator.scheduler import Schedule
from actors.messages import Admission, RowKind, StepInput


def build_step_input(schedule: Schedule, *, epoch: int, step: int) -> StepInput:
    """Only what changed: whole tables and sampling parameters travel at admission alone.

    A verify without drafts leaves its accepted rows pending on the shard (fill 0): a long stretch of them
    costs nothing, and a request about to end never fills.
    """
    rows = schedule.rows
    ids: list[list[int]] = []
    accepted: list[list[int]] = []
    for r in rows:
        if r.kind is RowKind.VERIFY:
            accepted.append(r.request.tokens[-r.request.num_accepted :])
            ids.append([])
        else:
            accepted.append([])
            ids.append(r.request.tokens[r.start : r.start + r.num_rows])
    new_blocks = [r.new_blocks for r in rows]
    k = [r.k for r in rows]
    return StepInput(
        epoch=epoch,
        step=step,
        admit=tuple(_admission(request) for request in schedule.admitted),
        slot=_int32s([r.request.slot for r in rows]),
        admission=_int32s([r.admission for r in rows]),
        kind=_uint8s([r.kind for r in rows]),
        k=_uint8s(k),
        fill=_uint8s([n > 0 for n in k]),
        start=_int32s([r.start for r in rows]),
        readonly=np.zeros(len(rows), np.uint8),
        ids=_flat(ids),
        ids_indptr=_indptr(ids),
        new_blocks=_flat(new_blocks),
        new_blocks_indptr=_indptr(new_blocks),
        accepted=_flat(accepted),
        accepted_indptr=_indptr(accepted),
    )


def _admission(request: RequestState) -> Admission:
    sampling = sampling_spec(request.request)
    return Admission(
        slot=request.slot,
        admission=request.admission,
        limit=request.limit,
        prompt_len=request.num_prompt_tokens,
        seed=request.request.seed,
        sampling=sampling,
        history=_int32s(request.tokens if sampling.needs_history else []),
    )


def _int32s(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _uint8s(values: list[int] | list[bool] | list[RowKind]) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)


def _flat(lists: list[list[int]]) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(lists), np.int32)


def _indptr(lists: Iterable[list[int]]) -> NDArray[np.int32]:
    return np.fromiter(accumulate(map(len, lists), initial=0), np.int32)
