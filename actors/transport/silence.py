"""How long a peer has been silent, as far as a listener can tell that may have been away itself."""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class SilenceWatch(Generic[Peer]):
    """Counts only time in which the listener listened.

    A listener that was stopped, starved or busy has heard nobody meanwhile, and what the others sent still
    waits to be read: by the plain clock they would all be dead when it wakes. So it calls `tick` about every
    tick_s, and of the time between two ticks no more than two tick_s count as silence.
    """

    def __init__(self, tick_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * tick_s
        self._clock = clock
        self._ticked_at_s = clock()
        self._heard_at_s: dict[Peer, float] = {}
        """Later than the truth by the time that the listener was away since."""

    def __contains__(self, peer: object) -> bool:
        return peer in self._heard_at_s

    def peers(self) -> list[Peer]:
        """Whoever was heard and not forgotten."""
        return list(self._heard_at_s)

    def heard(self, peer: Peer) -> bool:
        """A sign of life. True when the peer was not known."""
        is_new = peer not in self._heard_at_s
        self._heard_at_s[peer] = self._clock()
        return is_new

    def forget(self, peer: Peer) -> None:
        self._heard_at_s.pop(peer, None)

    def tick(self) -> None:
        """The listener is here."""
        now = self._clock()
        away_s = max(0.0, now - self._ticked_at_s - self._most_s)
        self._ticked_at_s = now
        if away_s:
            self._heard_at_s = {peer: min(at_s + away_s, now) for peer, at_s in self._heard_at_s.items()}

    def silence_s(self, peer: Peer) -> float:
        """Of a peer that was heard, at any moment between ticks."""
        present_until_s = min(self._clock(), self._ticked_at_s + self._most_s)
        return max(0.0, present_until_s - self._heard_at_s[peer])

    def silent(self, limit_s: float) -> list[Peer]:
        """Peers that were not heard for longer than limit_s."""
        return [peer for peer in self._heard_at_s if self.silence_s(peer) > limit_s]
