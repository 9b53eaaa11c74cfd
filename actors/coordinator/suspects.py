"""Which request kills the shards: found by letting ever fewer of them run."""

from collections.abc import Sequence

from actors.requests import SequenceKey

_ENOUGH_TOKENS = 2
"""What a request must get after a loss to be cleared of it. Its second token: what follows a step's report,
which brings the first, has ended by then."""


class Suspects:
    """Requests that ran when shards were lost, and have got no further since.

    One loss may have any cause, and everybody runs again. With a second one, before the suspects of the first
    are cleared, a trial begins: half of those that ran then run alone, of them half after another loss, and
    the others when these are cleared. Who is the last on trial when shards are lost is guilty. Meanwhile
    everybody else waits, but for those that were cleared.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[SequenceKey, int] = {}
        """Of each suspect: tokens since the loss."""
        self._accused: set[SequenceKey] = set()
        """Those of the suspects among whom one is guilty, as a trial has shown."""
        self._on_trial: set[SequenceKey] | None = None
        """None: there is no trial."""
        self._cleared: set[SequenceKey] = set()
        """In this trial."""

    def __bool__(self) -> bool:
        return bool(self._num_tokens)

    def waits(self, key: SequenceKey) -> bool:
        """Whether it must not run now."""
        return self._on_trial is not None and key not in self._on_trial and key not in self._cleared

    def lost(self, running: Sequence[SequenceKey]) -> tuple[SequenceKey | None, bool]:
        """Shards were lost while these ran. Who is guilty, if it is known; whether the circle is closer."""
        if self._on_trial is None:
            is_repeated = not self._num_tokens.keys().isdisjoint(running)
            self._num_tokens = dict.fromkeys(running, 0)
            if is_repeated:
                self._try_half()
            return None, False
        blamed = [key for key in self._num_tokens if key in self._on_trial and key in running]
        if len(blamed) == 1:
            self.clear(blamed[0])
            return blamed[0], True
        if not blamed:  # of those that were cleared
            return None, False
        self._num_tokens = dict.fromkeys(self._num_tokens, 0)
        self._accused = set(blamed)
        self._try_half()
        return None, True

    def got_token(self, key: SequenceKey) -> bool:
        """A request has got further. Whether others may run now because of it."""
        if key not in self._num_tokens:
            return False
        self._num_tokens[key] += 1
        return self._num_tokens[key] >= _ENOUGH_TOKENS and self.clear(key)

    def clear(self, key: SequenceKey) -> bool:
        """It is no suspect, or has ended. Whether others may run now because of it."""
        self._num_tokens.pop(key, None)
        self._accused.discard(key)
        if self._on_trial is None or key not in self._on_trial:
            return False
        self._on_trial.remove(key)
        self._cleared.add(key)
        if self._on_trial:
            return False
        self._try_half()
        return True

    def _try_half(self) -> None:
        """The next trial: of half of the accused, or else of all suspects. Without any there is none."""
        tried = [key for key in self._num_tokens if key in self._accused] or list(self._num_tokens)
        self._on_trial = set(tried[: (len(tried) + 1) // 2]) or None
        if not tried:
            self._cleared.clear()
