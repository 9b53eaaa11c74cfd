"""Front ends that follow a group: told where it can be reached, and when it has failed."""

from typing import Protocol


class Follower(Protocol):
    """A front end, by whatever way it hears of its group. Called in the supervisor's thread."""

    def moved(self, request_address: str) -> None:
        """The coordinator has a successor, which listens there."""

    def lost(self, reason: str) -> None:
        """The group has failed for good."""


class Followers(list[Follower]):
    """All that follow one group."""

    def moved(self, request_address: str) -> None:
        for follower in self:
            follower.moved(request_address)

    def lost(self, reason: str) -> None:
        for follower in self:
            follower.lost(reason)
