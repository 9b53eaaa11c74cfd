"""Which peers have fallen silent, as a listener judges it that may itself have been away."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

Peer = TypeVar("Peer")
LATE_S = 1.0
"""A question that comes so much later than the one before shows that the listener was away."""


class Hearing(Generic[Peer]):
    """Ask `silent` regularly, every fraction of a second.

    A listener that was stopped, or busy, finds what its peers have said meanwhile still unread, or on its
    way: when it comes late to its own question, they get a fresh window.
    """

    def __init__(self, silence_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._heard_at_s: dict[Peer, float] = {}
        self._asked_at_s = clock()

    @property
    def peers(self) -> list[Peer]:
        return list(self._heard_at_s)

    def heard(self, peer: Peer) -> bool:
        """Note that a peer lives now. True when it was not known."""
        is_new = peer not in self._heard_at_s
        self._heard_at_s[peer] = self._clock()
        return is_new

    def forget(self, peer: Peer) -> None:
        self._heard_at_s.pop(peer, None)

    def silent(self) -> list[Peer]:
        """Peers not heard for longer than silence_s."""
        now = self._clock()
        was_away = now - self._asked_at_s > LATE_S
        self._asked_at_s = now
        if was_away:
            self._heard_at_s = dict.fromkeys(self._heard_at_s, now)
        return [peer for peer, at_s in self._heard_at_s.items() if now - at_s > self._silence_s]
