"""Messages of steps that a test writes by hand, and a shard alone to run them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.config import GroupConfig
from actors.messages import Admission, RowKind, SamplingSpec, StepInput, StepOutput
from actors.shard.build import build_shard
from kernels_integration.collectives import SoloCollectives


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one request in a step: a verify of k drafts without `ids`, else a chunk of these tokens."""

    slot: int
    admission: int = 1
    k: int = 0
    ids: Sequence[int] = ()
    start: int = -1
    readonly: int = 0
    is_final: bool = True
    fill: bool | None = None
    """None: where k > 0."""
    new_blocks: Sequence[int] = field(default=())

    @property
    def kind(self) -> RowKind:
        if not self.ids:
            return RowKind.VERIFY
        return RowKind.FINAL_CHUNK if self.is_final else RowKind.MIDDLE_CHUNK


def admission(slot: int, *, number: int = 1, limit: int = 1000, seed: int = 7, **sampling: Any) -> Admission:
    """Greedy unless a temperature is given."""
    spec = SamplingSpec(**({"temperature": 0.0} | sampling))
    return Admission(slot=slot, admission=number, limit=limit, prompt_len=1, seed=seed, sampling=spec)


def step_input(number: int, rows: Sequence[Rows], admit: Sequence[Admission] = ()) -> StepInput:
    """The message of these rows, which stand in a message's order."""
    return StepInput(
        epoch=0,
        step=number,
        admit=tuple(admit),
        slot=_int32s([r.slot for r in rows]),
        admission=_int32s([r.admission for r in rows]),
        kind=np.array([r.kind for r in rows], np.uint8),
        k=np.array([r.k for r in rows], np.uint8),
        fill=np.array([r.k > 0 if r.fill is None else r.fill for r in rows], np.uint8),
        start=_int32s([r.start for r in rows]),
        readonly=np.array([r.readonly for r in rows], np.uint8),
        ids=_int32s([token for r in rows for token in r.ids]),
        ids_indptr=_indptr([len(r.ids) for r in rows]),
        new_blocks=_int32s([block for r in rows for block in r.new_blocks]),
        new_blocks_indptr=_indptr([len(r.new_blocks) for r in rows]),
        accepted=_int32s([]),
        accepted_indptr=_indptr([0 for _ in rows]),
    )


class LoneShard:
    """The only rank of a group, which runs the steps that a test writes."""

    def __init__(self, config: GroupConfig, *, fixed_shapes: bool = False) -> None:
        solo = SoloCollectives()
        self.shard = build_shard(config, tp=solo, dcp_comm=solo, fixed_shapes=fixed_shapes)
        self._num_steps = 0

    def run(self, *rows: Rows, admit: Sequence[Admission] = ()) -> StepOutput:
        reports: list[StepOutput] = []
        self._num_steps += 1
        self.shard.execute(step_input(self._num_steps, rows, admit), reports.append)
        [report] = reports
        return report


def _int32s(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _indptr(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
