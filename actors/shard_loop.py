"""A shard's life: join the collectives, load the model, run steps, join the next epoch. No Ray."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from actors.config import GroupConfig
from actors.messages import StepInput, StepOutput
from actors.shard_spec import ShardSpec
from actors.transport.collectives import join_collectives
from actors.transport.step_channel import ShardEnd
from kernels_integration.collectives import Collectives
from kernels_integration.collectives.renewable import RenewableCollectives
from kernels_integration.errors import LatentrayError, ProtocolError, UnavailableError
from kernels_integration.spans import Span, Spans

logger = logging.getLogger(__name__)

_SETTLE_EVERY_S = 50e-6
"""How often a shard that waits for its next step looks whether one has ended."""


class StepRunner(Protocol):
    """What the loop drives: `actors.shard.Shard`, or an echo in tests and benchmarks."""

    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None: ...

    def rejoin(self) -> None:
        """Go on among other ranks, of which some are built now; calls the collectives that `build` calls."""

    def settle(self, *, wait: bool) -> bool:
        """Report steps that have ended since; wait: all. Whether none is left to report."""
        ...


class BuildShard(Protocol):
    def __call__(
        self, config: GroupConfig, *, tp: Collectives, dcp_comm: Collectives, spans: Spans
    ) -> StepRunner: ...


class ShardLoop:
    """One shard, through the epochs of its group: `load` and `run` once for each, by one thread (torch keeps
    the thread count per thread).

    The model and the KV cache's memory are kept from epoch to epoch. What a request had on this shard is not:
    the coordinator admits every request anew, and an admission resets all of its slot's state.
    """

    def __init__(self, build: BuildShard) -> None:
        self._build = build
        self._spec: ShardSpec | None = None
        self._end: ShardEnd | None = None
        self._sets: list[RenewableCollectives] = []
        """The tensor-parallel set, then the DCP set."""
        self._shard: StepRunner | None = None
        self._spans = Spans(is_on=False)

    def load(self, spec: ShardSpec) -> None:
        """Join the other ranks; the first time also load this rank's slice of the model.

        Errors: CheckpointError, ConfigError, CollectiveError, which the coordinator is told too;
        UnavailableError where there is none.
        """
        self._spec = spec
        try:
            end = ShardEnd(
                spec.step_address, spec.tp_rank, epoch=spec.epoch, node=spec.node_ip, keys=spec.step_keys
            )
        except OSError as error:
            raise UnavailableError(
                f"the coordinator at {spec.step_address} cannot be reached: {error}"
            ) from error
        self._end = end
        with self._telling_coordinator():
            torch.set_num_threads(spec.num_threads)
            joined = join_collectives(
                spec.collectives,
                rank=spec.tp_rank,
                topology=spec.config.topology,
                node_ip=spec.node_ip,
            )
            if self._shard is None:
                self._spans = Spans(is_on=spec.config.trace)
                self._sets = [RenewableCollectives(comm) for comm in joined]
                tp, dcp_comm = self._sets
                self._shard = self._build(spec.config, tp=tp, dcp_comm=dcp_comm, spans=self._spans)
            else:
                for kept, comm in zip(self._sets, joined, strict=True):
                    kept.renew(comm)
                self._shard.rejoin()
            end.ready()

    def run(self) -> None:
        """Run steps until the coordinator ends the epoch; then leave the other ranks."""
        if self._shard is None or self._end is None:
            raise ProtocolError("the shard was asked to run before it has loaded; call load first")
        with self._telling_coordinator():
            while (step := _next_step(self._shard, self._end)) is not None:
                with self._spans("step", step.step):
                    self._shard.execute(step, self._report)
        self.close()

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _report(self, output: StepOutput) -> None:
        assert self._end is not None, "run has checked it"
        with self._spans("report"):
            self._end.report(output)

    def close(self) -> None:
        """Leave the epoch."""
        for member in self._sets:
            member.close()
        if self._end is not None:
            self._end.close()
            self._end = None

    @contextmanager
    def _telling_coordinator(self) -> Iterator[None]:
        """An error that leaves this block ends the shard's epoch: the coordinator hears its code and text,
        and the ranks that wait for this one are released."""
        assert self._spec is not None
        assert self._end is not None
        try:
            yield
        except Exception as error:
            logger.exception("shard %d failed", self._spec.tp_rank)
            code = error.code if isinstance(error, LatentrayError) else LatentrayError.code
            self._end.fail(code, f"{type(error).__name__}: {error}")
            self.close()
            raise


def _next_step(shard: StepRunner, end: ShardEnd) -> StepInput | None:
    """Wait for it; until it comes, steps that the device ends are reported."""
    while not shard.settle(wait=False) and not end.has_message:
        time.sleep(_SETTLE_EVERY_S)
    return end.receive()
