"""A shard under Ray's supervision: arguments and exit. The work is ShardLoop's."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import ray

from actors.actor_process import ActorProcess, Node, this_node
from actors.model.load_progress import LoadProgress, LoadState
from actors.model_location import to_local
from actors.shard_spec import ShardSpec
from kernels_integration.errors import ProtocolError

if TYPE_CHECKING:
    from actors.shard_loop import ShardLoop
    from kernels_integration.spans import Span


@ray.remote(concurrency_groups={"control": 2}, max_restarts=0)
class ShardActor(ActorProcess):
    """`load`, then a long `run`, once an epoch, both in Ray's default group, which is one thread."""

    def __init__(self) -> None:
        self._loop: ShardLoop | None = None
        self._load_progress = LoadProgress()

    def warm(self) -> Node:
        """As ActorProcess.warm: torch alone takes seconds."""
        from actors.shard.build import build_shard  # noqa: F401
        from actors.shard_loop import ShardLoop  # noqa: F401

        return this_node()

    def can_share_memory(self) -> bool:
        """Whether shards on this node may talk through shared memory."""
        from kernels_integration.collectives.segment import is_supported

        return is_supported()

    def load(self, spec: ShardSpec) -> None:
        """Join the ranks of an epoch; the first time also load the model's slice.

        Errors: those of ShardLoop.load.
        """
        # Not at the top: the driver imports this module and needs no torch.
        from actors.shard.build import build_shard
        from actors.shard_loop import ShardLoop

        if self._loop is None:
            build = functools.partial(build_shard, progress=self._load_progress, prepares_grammars=True)
            self._loop = ShardLoop(build)
        self._loop.load(dataclasses.replace(spec, config=to_local(spec.config)))

    def load_progress(self) -> LoadState:
        """How far `load` has come with the weights; ask in the control group."""
        return self._load_progress.state()

    def take_spans(self) -> "list[Span]":
        """Where the time went since the last call; empty unless the group is traced."""
        return self._loop.take_spans() if self._loop is not None else []

    def run(self) -> None:
        """Run steps until the coordinator ends the epoch. Raises what ended it otherwise."""
        if self._loop is None:
            raise ProtocolError("the shard was asked to run before it has loaded; call load first")
        self._loop.run()
