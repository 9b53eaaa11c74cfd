"""What a gateway needs of a group; `cluster.answering.group_client.GroupClient` is it over sockets."""

from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from actors.requests import Request, RequestUpdate
from actors.stats import GroupStats


class Group(Protocol):
    """One group, seen from a front end."""

    @property
    def healthy(self) -> bool:
        """A token can be produced now."""

    @property
    def message(self) -> str:
        """Why it is not healthy, in words."""

    @property
    def stats(self) -> GroupStats | None:
        """The newest figures, None before the first."""

    def generate(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """The request's updates; the last has a finish_reason. Closing the iterator early aborts the request.

        Errors: LatentrayError by the failure's code, AbortedError after an abort.
        """

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Free these requests within one step. Unknown and finished ids are no error."""
