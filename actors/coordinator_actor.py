"""A coordinator under Ray's supervision: arguments, health, exit. The work is CoordinatorLoop's."""

from pathlib import Path

import ray
from tokenizers import Tokenizer

from actors.actor_process import ActorProcess
from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.coordinator.group_state import GroupState
from actors.coordinator_loop import CoordinatorLoop
from actors.model_location import to_local
from actors.transport import request_channel, step_channel
from actors.transport.channel_keys import GroupKeys
from kernels_integration.errors import ProtocolError
from kernels_integration.spans import Span, Spans


@ray.remote(concurrency_groups={"control": 2, "watch": 1}, max_restarts=0)
class CoordinatorActor(ActorProcess):
    """`open`, then one `run` for life; the control group answers meanwhile."""

    def __init__(self) -> None:
        self._loop: CoordinatorLoop | None = None
        self._spans = Spans(is_on=False)

    def open(
        self, config: GroupConfig, host: str, epoch: int, keys: GroupKeys, recovers: str = ""
    ) -> tuple[str, str]:
        """Listen on free ports of `host`; the addresses for shards and for front ends.

        keys: of whom both let in.
        recovers: the account of the loss of the coordinator before this one.
        """
        config = to_local(config)
        tokenizer_file = Path(config.model_path) / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.exists() else None
        shards = step_channel.CoordinatorEnd(
            config.tensor_parallel_size, host=host, epoch=epoch, keys=keys.steps.server
        )
        clients = request_channel.CoordinatorEnd(bind=f"tcp://{host}:*", keys=keys.requests.server)
        self._spans = Spans(is_on=config.trace)
        coordinator = Coordinator(config, tokenizer=tokenizer, spans=self._spans)
        if epoch:
            coordinator.restart(epoch)
        self._loop = CoordinatorLoop(
            coordinator,
            shards,
            clients,
            silence_s=config.heartbeat_timeout_s,
            stall_s=config.step_timeout_s,
            max_restarts=config.max_restarts,
            recovers=recovers,
            spans=self._spans,
        )
        return shards.address, clients.address

    def run(self) -> None:
        """Serve until `stop`."""
        self._opened.run()

    def stop(self) -> None:
        """End live requests, let the shards go, end `run`."""
        self._opened.stop()

    def shard_lost(self, rank: int, text: str, epoch: int) -> None:
        """The supervisor saw the process of an epoch's shard end."""
        self._opened.shard_lost(rank, text, epoch)

    def recovery_waits(self, text: str) -> None:
        """What the start of the next shards waits for; before `open` nobody asks."""
        if self._loop is not None:
            self._loop.recovery_waits(text)

    def give_up(self, text: str) -> None:
        """The next shards cannot be started."""
        self._opened.give_up(text)

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def num_ready_shards(self) -> int:
        return self._opened.num_ready_shards

    def wait_change(self, epoch: int) -> GroupState:
        """Wait until the shards of a later epoch are wanted, or the group is over. For the watch group."""
        return self._opened.wait_change(epoch)

    @property
    def _opened(self) -> CoordinatorLoop:
        if self._loop is None:
            raise ProtocolError("the coordinator was asked to work before it was opened; call open first")
        return self._loop
