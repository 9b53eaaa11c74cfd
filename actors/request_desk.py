"""The request side of a coordinator's loop: front ends' messages in, updates and failures out."""

import logging
from collections import defaultdict
from typing import Protocol

from actors.requests import Request, RequestFailed, RequestUpdate
from actors.transport import request_channel
from actors.transport.request_channel import Abort, ClientId, Goodbye, GroupBeat, Submit
from kernels_integration.errors import DuplicateRequestError, LatentrayError

logger = logging.getLogger(__name__)


class RequestPolicy(Protocol):
    """What the desk needs of `actors.coordinator.Coordinator`."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def take_updates(self) -> list[RequestUpdate | RequestFailed]: ...


class RequestDesk:
    """Knows which front end each live request is of, and tells it what becomes of it.

    It never waits: the loop calls `receive` when the channel has something to read.
    """

    def __init__(self, coordinator: RequestPolicy, clients: request_channel.CoordinatorEnd) -> None:
        self._coordinator = coordinator
        self._clients = clients
        self._owners: dict[str, ClientId] = {}
        """Front end of each live request."""
        self._has_failed = False

    def receive(self, beat: GroupBeat, refusal: LatentrayError | None) -> None:
        """Take what front ends have sent. beat: for those that say hello. refusal: why nothing is taken."""
        for client, message in self._clients.receive():
            if isinstance(message, Submit):
                self._submit(client, message.request, refusal)
            elif isinstance(message, Abort):
                self._abort([r for r in message.request_ids if r in self._owners])
            elif isinstance(message, Goodbye):
                self._abort_all_of(client)
            else:
                self._clients.beat(beat, client)

    def send_updates(self) -> None:
        """Pass on what the coordinator has decided since the last call."""
        if self._has_failed:
            return
        updates: defaultdict[ClientId, list[RequestUpdate]] = defaultdict(list)
        failures: defaultdict[ClientId, list[RequestFailed]] = defaultdict(list)
        for update in self._coordinator.take_updates():
            owner = self._owners.get(update.request_id)
            if owner is None:
                continue
            if isinstance(update, RequestFailed):
                failures[owner].append(update)
                del self._owners[update.request_id]
            else:
                updates[owner].append(update)
                if update.finish_reason is not None:
                    del self._owners[update.request_id]
        for owner in updates.keys() | failures.keys():
            self._clients.send(owner, updates=updates[owner], failures=failures[owner])

    def beat(self, beat: GroupBeat) -> None:
        """Tell every front end how the group is."""
        self._clients.beat(beat)

    def drop_silent(self) -> None:
        """End the requests of front ends that are gone."""
        for client in self._clients.take_silent():
            logger.warning("a front end is gone; its requests are aborted")
            self._abort_all_of(client)

    def fail(self, error: LatentrayError) -> None:
        """The group has failed for good: end live requests with this error, ask the coordinator no more."""
        self._has_failed = True
        by_owner: defaultdict[ClientId, list[RequestFailed]] = defaultdict(list)
        for request_id, owner in self._owners.items():
            by_owner[owner].append(RequestFailed(request_id=request_id, code=error.code, message=str(error)))
        self._owners.clear()
        for owner, failures in by_owner.items():
            self._clients.send(owner, failures=failures)

    def _submit(self, client: ClientId, request: Request, refusal: LatentrayError | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            if request.request_id in self._owners:
                raise DuplicateRequestError(
                    f"request id {request.request_id!r} belongs to a live request; use another id"
                )
            self._coordinator.submit(request)
        except LatentrayError as error:
            failed = RequestFailed(request_id=request.request_id, code=error.code, message=str(error))
            self._clients.send(client, failures=(failed,))
        else:
            self._owners[request.request_id] = client

    def _abort_all_of(self, client: ClientId) -> None:
        self._abort([r for r, owner in self._owners.items() if owner == client])

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids and not self._has_failed:
            self._coordinator.abort(request_ids)
