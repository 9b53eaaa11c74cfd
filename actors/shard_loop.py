"""A shard's life: join the collectives, load the model, run steps until told to stop. No Ray."""

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
from kernels_integration.errors import LatentrayError, ProtocolError
from kernels_integration.spans import Span, Spans

logger = logging.getLogger(__name__)

_SETTLE_EVERY_S = 50e-6
"""How often a shard that waits for its next step looks whether one has ended."""


class StepRunner(Protocol):
    """What the loop drives: `actors.shard.Shard`, or an echo in tests and benchmarks."""

    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None: ...

    def settle(self, *, wait: bool) -> bool:
        """Report steps that have ended since; wait: all. Whether none is left to report."""
        ...


class BuildShard(Protocol):
    def __call__(
        self, config: GroupConfig, *, tp: Collectives, dcp_comm: Collectives, spans: Spans
    ) -> StepRunner: ...


class ShardLoop:
    """One shard. `load` and `run` belong to one thread: torch keeps the thread count per thread."""

    def __init__(self, spec: ShardSpec, build: BuildShard) -> None:
        self._spec = spec
        self._build = build
        self._end = ShardEnd(spec.step_address, spec.tp_rank, epoch=spec.epoch, node=spec.node_ip)
        self._collectives: list[Collectives] = []
        self._shard: StepRunner | None = None
        self._spans = Spans(is_on=spec.config.trace)

    def load(self) -> None:
        """Join the other ranks and load this rank's slice of the model.

        Errors: CheckpointError, ConfigError, CollectiveError; the coordinator is told too.
        """
        with self._telling_coordinator():
            torch.set_num_threads(self._spec.num_threads)
            config = self._spec.config
            tp, dcp_comm = join_collectives(
                self._spec.collectives,
                rank=self._spec.tp_rank,
                topology=config.topology,
                node_ip=self._spec.node_ip,
            )
            self._collectives = [tp] if dcp_comm is tp else [tp, dcp_comm]
            self._shard = self._build(config, tp=tp, dcp_comm=dcp_comm, spans=self._spans)
            self._end.ready()

    def run(self) -> None:
        """Run steps until the coordinator ends the loop; then leave the other ranks."""
        if self._shard is None:
            raise ProtocolError("the shard was asked to run before it has loaded; call load first")
        with self._telling_coordinator():
            while (step := self._next_step(self._shard)) is not None:
                with self._spans("step", step.step):
                    self._shard.execute(step, self._report)
        self.close()

    def _next_step(self, shard: StepRunner) -> StepInput | None:
        """Wait for it; until it comes, steps that the device ends are reported."""
        while not shard.settle(wait=False) and not self._end.has_message:
            time.sleep(_SETTLE_EVERY_S)
        return self._end.receive()

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _report(self, output: StepOutput) -> None:
        with self._spans("report"):
            self._end.report(output)

    def close(self) -> None:
        for member in self._collectives:
            member.close()
        self._end.close()

    @contextmanager
    def _telling_coordinator(self) -> Iterator[None]:
        """An error that leaves this block ends the shard: the coordinator hears its code and text, and
        the ranks that wait for this one are released."""
        try:
            yield
        except Exception as error:
            logger.exception("shard %d failed", self._spec.tp_rank)
            code = error.code if isinstance(error, LatentrayError) else LatentrayError.code
            self._end.fail(code, f"{type(error).__name__}: {error}")
            self.close()
            raise
