"""The life of a group, as plain data: what it does now, in which epoch, and why it does not serve.

    starting -> serving -> recovering -> serving
    starting, serving, recovering -> failed
    every one -> stopping, which is the last

An epoch is one set of shards. Events of an older epoch change nothing; a lost shard ends its epoch, and
the next one begins while restarts are left. They are given back by a while of steady service.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from kernels_integration.errors import UnavailableError

_BACK_OFF_S = 0.5
_MAX_BACK_OFF_S = 30.0
STEADY_S = 60.0
"""Service for so long without a loss makes up for the losses before."""


def back_off_s(num_in_vain: int) -> float:
    """How long to wait before the last of so many restarts that did nothing: before one not at all."""
    return min(_BACK_OFF_S * 2 ** (num_in_vain - 2), _MAX_BACK_OFF_S) if num_in_vain > 1 else 0.0


class Phase(StrEnum):
    STARTING = "starting"
    """The first shards load."""
    SERVING = "serving"
    RECOVERING = "recovering"
    """New shards load; requests live on and wait."""
    FAILED = "failed"
    """Nothing will be served any more."""
    STOPPING = "stopping"


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.SERVING, Phase.FAILED, Phase.STOPPING}),
    Phase.SERVING: frozenset({Phase.RECOVERING, Phase.FAILED, Phase.STOPPING}),
    Phase.RECOVERING: frozenset({Phase.SERVING, Phase.RECOVERING, Phase.FAILED, Phase.STOPPING}),
    Phase.FAILED: frozenset({Phase.STOPPING}),
    Phase.STOPPING: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A value; each event gives the next one, or the same where it changes nothing."""

    num_shards: int
    max_restarts: int = 0
    """Epochs that may begin without steady service between them. 0: the first lost shard ends the group."""
    num_restarts: int = 0
    """Since the group served steadily."""
    num_in_vain: int = 0
    """Restarts since a step has reported."""
    phase: Phase = Phase.STARTING
    epoch: int = 0
    ready: frozenset[int] = frozenset()
    """Ranks of this epoch that wait for steps."""
    lost_rank: int | None = None
    """Recovering: whose loss began the epoch, as far as is known."""
    cause: str = ""
    """Why it recovers or has failed."""
    code: str = UnavailableError.code
    """Of the cause."""

    @property
    def is_serving(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def is_over(self) -> bool:
        """No token will come any more."""
        return self.phase in (Phase.FAILED, Phase.STOPPING)

    @property
    def message(self) -> str:
        """For people: 'ready', or why it does not serve."""
        waits = f"{len(self.ready)} of {self.num_shards} shards are ready"
        return {
            Phase.STARTING: waits,
            Phase.SERVING: "ready",
            Phase.RECOVERING: f"recovering, {waits}: {self.cause}",
            Phase.FAILED: self.cause,
            Phase.STOPPING: "the group is stopping",
        }[self.phase]

    def shard_ready(self, rank: int, epoch: int) -> "GroupState":
        """A shard has loaded its model; with the last one the group serves."""
        if epoch != self.epoch or self.is_over or rank in self.ready or not 0 <= rank < self.num_shards:
            return self
        ready = self.ready | {rank}
        is_complete = len(ready) == self.num_shards
        return replace(self, ready=ready, phase=Phase.SERVING if is_complete else self.phase)

    def shards_lost(
        self, cause: str, epoch: int, rank: int | None = None, *, counts: bool = True
    ) -> "GroupState":
        """A shard of this epoch is gone: without it the others wait.

        counts: as one of max_restarts; not where the loss has brought its cause nearer.
        """
        if epoch != self.epoch or self.is_over:
            return self
        # What keeps a group from starting (a checkpoint, no memory) would keep it the next time too.
        if self.phase is Phase.STARTING or (counts and self.num_restarts == self.max_restarts):
            return self.failed(cause)
        return replace(
            self,
            phase=Phase.RECOVERING,
            epoch=self.epoch + 1,
            num_restarts=self.num_restarts + counts,
            num_in_vain=self.num_in_vain + 1,
            ready=frozenset(),
            lost_rank=rank,
            cause=cause,
        )

    def stepped(self) -> "GroupState":
        """A step has reported: these shards work."""
        return replace(self, num_in_vain=0) if self.num_in_vain and self.is_serving else self

    def steady(self) -> "GroupState":
        """It has served for a while: what was lost before counts no more."""
        return replace(self, num_restarts=0) if self.is_serving else self

    def failed(self, cause: str, code: str = UnavailableError.code) -> "GroupState":
        """The group itself cannot go on."""
        return self if self.is_over else replace(self, phase=Phase.FAILED, cause=cause, code=code)

    def corrected(self, cause: str) -> "GroupState":
        """A better account of what the state holds already, or of what it waits for."""
        return replace(self, cause=cause) if self.phase in (Phase.FAILED, Phase.RECOVERING) else self

    def stopping(self) -> "GroupState":
        return replace(self, phase=Phase.STOPPING)


class Evidence(IntEnum):
    """What told of a loss; the higher, the nearer to its cause."""

    SILENCE = 0
    """Nothing was heard for longer than the limit."""
    PEERS = 1
    """A shard failed in a collective: some other shard has left it."""
    CONNECTION = 2
    """A lifeline has ended. A shard that gives up ends its own too, after it has said why."""
    WORDS = 3
    """The shard itself has said why it cannot go on."""
    PROCESS = 4
    """Who supervises the processes saw one end."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One sign that shards are lost, as it came in."""

    evidence: Evidence
    rank: int
    text: str


class Diagnosis:
    """Which of an epoch's symptoms names the cause.

    When one shard dies the others fail in their collectives, and who is heard first is chance: the first
    symptom is not the cause. So symptoms are collected for settle_s, unless one is beyond doubt.
    """

    def __init__(self, *, settle_s: float, clock: Callable[[], float]) -> None:
        self._settle_s = settle_s
        self._clock = clock
        self._symptoms: list[Symptom] = []
        self._settles_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Something is wrong, whatever it is."""
        return bool(self._symptoms)

    @property
    def settles_at_s(self) -> float:
        """When `cause` may be told, by the clock."""
        return self._settles_at_s

    def add(self, symptom: Symptom) -> bool:
        """Whether it is a better account than what was known."""
        before = self.cause
        if before is None:
            self._settles_at_s = self._clock() + self._settle_s
        if symptom.evidence >= Evidence.WORDS:
            self._settles_at_s = min(self._settles_at_s, self._clock())
        self._symptoms.append(symptom)
        return self.cause is not before

    @property
    def cause(self) -> Symptom | None:
        """The best of what is known now; of equals the first.

        A connection of a shard that has told of its peers' loss was closed by itself.
        """
        accusers = {s.rank for s in self._symptoms if s.evidence is Evidence.PEERS}
        best: Symptom | None = None
        for symptom in self._symptoms:
            if symptom.evidence is Evidence.CONNECTION and symptom.rank in accusers:
                continue
            if best is None or symptom.evidence > best.evidence:
                best = symptom
        return best

    def clear(self) -> None:
        """A new epoch."""
        self._symptoms.clear()
