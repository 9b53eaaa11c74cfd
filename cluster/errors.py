"""The one table of error codes: code -> gRPC status, HTTP status, exit code of the CLI.

gRPC statuses are names, so that this module needs no grpc: `grpc.StatusCode[outcome(code).grpc_status]`.
"""

import logging
import uuid
from dataclasses import dataclass

from kernels_integration.errors import InvalidRequestError, LatentrayError, OverloadedError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
EXIT_OK = 0
EXIT_USAGE = 2
EXIT_PARTLY_FAILED = 3
EXIT_UNAVAILABLE = 4
EXIT_INTERNAL = 5
EXIT_HUNG_UP = 129
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_USAGE: "a flag, setting, file, checkpoint or request that cannot work; the message says why",
    EXIT_PARTLY_FAILED: "`batch`: done, but rows have failed; each has its error in the output",
    EXIT_UNAVAILABLE: "no server, cluster, memory or port to work with, or it was lost on the way",
    EXIT_INTERNAL: "a fault of latentray; please report it with the lines before",
    EXIT_HUNG_UP: "ended by SIGHUP: its terminal is gone",
    EXIT_INTERRUPTED: "ended by Ctrl-C",
    EXIT_TERMINATED: "ended by SIGTERM",
}
"""Of the command line."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an error leaves the project."""

    grpc_status: str
    http_status: int
    exit_code: int


OUTCOMES: dict[str, Outcome] = {
    "invalid_config": Outcome("INVALID_ARGUMENT", 400, EXIT_USAGE),
    "invalid_checkpoint": Outcome("FAILED_PRECONDITION", 500, EXIT_USAGE),
    "invalid_request": Outcome("INVALID_ARGUMENT", 400, EXIT_USAGE),
    "invalid_api_key": Outcome("UNAUTHENTICATED", 401, EXIT_USAGE),
    "unknown_parameter": Outcome("INVALID_ARGUMENT", 400, EXIT_USAGE),
    "context_length_exceeded": Outcome("INVALID_ARGUMENT", 400, EXIT_USAGE),
    "model_not_found": Outcome("NOT_FOUND", 404, EXIT_USAGE),
    "duplicate_request": Outcome("ALREADY_EXISTS", 409, EXIT_USAGE),
    "aborted": Outcome("CANCELLED", 499, EXIT_UNAVAILABLE),
    "overloaded": Outcome("RESOURCE_EXHAUSTED", 429, EXIT_UNAVAILABLE),
    "unavailable": Outcome("UNAVAILABLE", 503, EXIT_UNAVAILABLE),
    "cluster_too_small": Outcome("UNAVAILABLE", 503, EXIT_UNAVAILABLE),
    "deadline_exceeded": Outcome("DEADLINE_EXCEEDED", 504, EXIT_UNAVAILABLE),
    "collective_failed": Outcome("UNAVAILABLE", 503, EXIT_UNAVAILABLE),
    "poison_request": Outcome("FAILED_PRECONDITION", 422, EXIT_USAGE),
    "invalid_plan": Outcome("INTERNAL", 500, EXIT_INTERNAL),
    "protocol": Outcome("INTERNAL", 500, EXIT_INTERNAL),
    "internal": Outcome("INTERNAL", 500, EXIT_INTERNAL),
}


def outcome(error: LatentrayError | str) -> Outcome:
    """The row of an error or of a code. A code that nobody registered is an internal fault."""
    code = error if isinstance(error, str) else error.code
    return OUTCOMES.get(code, OUTCOMES["internal"])


def retry_after_s(error: LatentrayError) -> float:
    """Told to clients that may retry; if nothing better is known, enough for a step and a heartbeat."""
    return error.retry_after_s if isinstance(error, OverloadedError) else RETRY_AFTER_S


def for_client(error: Exception, call: str) -> LatentrayError:
    """The error as a client may see it: of a fault of ours an id, under which the log has the cause.

    call: what failed, in the log and the message.
    """
    if isinstance(error, LatentrayError) and outcome(error) != OUTCOMES["internal"]:
        return error
    error_id = uuid.uuid4().hex[:12]
    logger.error("error %s in %s", error_id, call, exc_info=error)
    return LatentrayError(
        f"internal error {error_id} in {call}: the server's log has its cause under this id "
        f"({type(error).__name__})"
    )


def error_classes() -> list[type[LatentrayError]]:
    """LatentrayError and every subclass that is imported, parents first."""
    classes: list[type[LatentrayError]] = [LatentrayError]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return classes


def from_code(code: str, message: str, *, field: str = "") -> LatentrayError:
    """The error that a code stands for, as it comes from another process."""
    for cls in error_classes():
        if cls.code == code:
            if issubclass(cls, InvalidRequestError):
                return cls(message, field=field)
            return cls(message)
    return LatentrayError(message)
