"""The request side of a coordinator's loop: front ends' messages in, updates and failures out."""

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.transport import request_channel
from actors.transport.request_channel import Abort, ClientId, Goodbye, GroupBeat, Submit
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError

logger = logging.getLogger(__name__)


class RequestPolicy(Protocol):
    """What the desk needs of `actors.coordinator.Coordinator`."""

    def submit(self, request: Request) -> None: ...

    def abort(self, keys: list[SequenceKey]) -> None: ...

    def take_updates(self) -> list[RequestUpdate | RequestFailed]: ...


class RequestDesk:
    """Knows which front end each live sequence is of, and tells it what becomes of it.

    No message of a front end ends more than itself: what cannot be read is dropped, a request that cannot be
    taken fails alone. It never waits: the loop calls `receive` when the channel has something to read.
    """

    def __init__(self, coordinator: RequestPolicy, clients: request_channel.CoordinatorEnd) -> None:
        self._coordinator = coordinator
        self._clients = clients
        self._owners: dict[SequenceKey, ClientId] = {}
        """Front end of each live sequence."""
        self._has_failed = False

    def receive(self, beat: Callable[[], GroupBeat], refusal: LatentrayError | None) -> None:
        """Take what front ends have sent. beat: for those that say hello. refusal: why none is taken."""
        for client, message in self._clients.receive():
            if isinstance(message, Submit):
                self._submit(client, message, refusal)
            elif isinstance(message, Abort):
                self._abort([key for key in message.keys if self._owners.get(key) == client])
            elif isinstance(message, Goodbye):
                self._take_all_of(client)
            else:
                self._clients.beat(beat(), client)

    def send_updates(self) -> None:
        """Pass on what the coordinator has decided since the last call."""
        if self._has_failed:
            return
        updates: defaultdict[ClientId, list[RequestUpdate]] = defaultdict(list)
        failures: defaultdict[ClientId, list[RequestFailed]] = defaultdict(list)
        for update in self._coordinator.take_updates():
            if (owner := self._owners.get(update.key)) is None:
                continue
            if isinstance(update, RequestFailed):
                failures[owner].append(update)
                del self._owners[update.key]
            else:
                updates[owner].append(update)
                if update.finish_reason is not None:
                    del self._owners[update.key]
        for owner in updates.keys() | failures.keys():
            self._clients.send(owner, updates=updates[owner], failures=failures[owner])

    def beat(self, beat: GroupBeat) -> None:
        """Tell every front end how the group is."""
        self._clients.beat(beat)

    def drop_lost(self) -> None:
        """End the requests of front ends that are gone. One that was only away is told so."""
        for client in self._clients.take_lost():
            logger.warning("a front end is gone, or silent for too long; its requests are ended")
            self._tell(
                client,
                self._take_all_of(client),
                UnavailableError(
                    "the front end was not heard from for too long, and its requests were ended"
                ),
            )

    def fail(self, error: LatentrayError) -> None:
        """The group has failed for good: end live requests with this error, ask the coordinator no more."""
        self._has_failed = True
        for client in set(self._owners.values()):
            self._tell(client, self._take_all_of(client), error)

    def _submit(self, client: ClientId, message: Submit, refusal: LatentrayError | None) -> None:
        try:
            if refusal is not None:
                raise refusal
            self._coordinator.submit(_decoded(message))
        except LatentrayError as error:
            self._tell(client, [message.key], error)
        except Exception as error:
            logger.exception("a request failed when it was submitted")
            if message.key not in self._owners:
                self._abort([message.key])  # wherever it stopped, nothing of it stays
            self._tell(client, [message.key], LatentrayError(f"it could not be queued: {error!r}"))
        else:
            self._owners[message.key] = client

    def _take_all_of(self, client: ClientId) -> list[SequenceKey]:
        """End a front end's sequences; it owns them no more, so nothing else is sent to it about them."""
        keys = [key for key, owner in self._owners.items() if owner == client]
        self._abort(keys)
        for key in keys:
            del self._owners[key]
        return keys

    def _abort(self, keys: list[SequenceKey]) -> None:
        if keys and not self._has_failed:
            self._coordinator.abort(keys)

    def _tell(self, client: ClientId, keys: list[SequenceKey], error: LatentrayError) -> None:
        """These sequences have ended with this error."""
        if keys:
            failures = [RequestFailed.of(key, error.code, str(error)) for key in keys]
            self._clients.send(client, failures=failures)


def _decoded(message: Submit) -> Request:
    """Errors: InvalidRequestError for whatever is no request."""
    try:
        return request_channel.decode_request(message)
    except LatentrayError:
        raise
    except Exception as error:
        raise InvalidRequestError(f"the request cannot be read: {error}", field="request") from error
