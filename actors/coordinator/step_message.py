"""A schedule as the message that every shard gets (contracts/mtp.md 7)."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from actors.coordinator.request_state import RequestState
from actors.coordinator.sampling_spec import sampling_spec
from actors.coordinator.schedule import UNKNOWN_START, Schedule
from actors.messages import Admission, RowKind, StepInput


def build_step_input(schedule: Schedule, *, epoch: int, step: int) -> StepInput:
    """Only what changed: whole tables and sampling parameters travel at admission alone.

    A verify without drafts leaves its accepted rows pending on the shard (fill 0): a long stretch of them
    costs nothing, and a request about to end never fills.
    """
    rows = schedule.verifies + schedule.chunks
    requests, admissions, _, k, starts, _, readonly, new_blocks = zip(*rows, strict=True)
    num_verifies = len(schedule.verifies)
    kinds = np.full(len(rows), RowKind.VERIFY, np.uint8)
    kinds[num_verifies:] = [r.kind for r in schedule.chunks]
    ids = [r.request.tokens[r.start : r.start + r.num_rows] for r in schedule.chunks]
    accepted = [
        () if start == UNKNOWN_START else request.tokens[-request.num_accepted :]
        for request, start in zip(requests[:num_verifies], starts[:num_verifies], strict=True)
    ]
    drafts = np.array(k, np.uint8)
    return StepInput(
        epoch=epoch,
        step=step,
        admit=tuple(_admission(request) for request in schedule.admitted),
        slot=_int32s([request.slot for request in requests]),
        admission=_int32s(admissions),
        kind=kinds,
        k=drafts,
        fill=(drafts > 0).astype(np.uint8),
        start=_int32s(starts),
        readonly=np.array(readonly, np.uint8),
        ids=_flat(ids),
        ids_indptr=_indptr(num_verifies, ids, 0),
        new_blocks=_flat(new_blocks),
        new_blocks_indptr=_indptr(0, new_blocks, 0),
        accepted=_flat(accepted),
        accepted_indptr=_indptr(0, accepted, len(schedule.chunks)),
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


def _int32s(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _flat(lists: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    return np.array(list(chain.from_iterable(lists)), np.int32)


def _indptr(num_empty_before: int, lists: Sequence[Sequence[int]], num_empty_after: int) -> NDArray[np.int32]:
    indptr = np.zeros(num_empty_before + len(lists) + num_empty_after + 1, np.int32)
    end = num_empty_before + len(lists) + 1
    np.cumsum(list(map(len, lists)), out=indptr[num_empty_before + 1 : end])
    indptr[end:] = indptr[end - 1]
    return indptr
