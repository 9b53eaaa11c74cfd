"""Errors as data: each class has a stable `code`; `cluster.errors` maps codes outwards.

A message names the value, the rule, the legal values and the fix.
"""

from collections.abc import Iterator
from typing import ClassVar

MAX_SHOWN = 200
"""Characters of a value in a message: the rule behind it must be read too, and travel in a gRPC status."""


def shown(value: object) -> str:
    """The value as messages quote it: its repr, with the middle left out of a long one; null, true, false and
    lists as JSON has them, since most values come from there.

    Quick for any length.
    """
    if value is None or isinstance(value, bool):
        return kind_of(value)
    half = MAX_SHOWN // 2
    if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_SHOWN:
        return f"{_repr(value[:half])[:half]}...{_repr(value[-half:])[-half:]}"
    return shortened(_repr(value))


_MAX_SHOWN_DEPTH = 4
"""Of lists and objects inside each other."""


def _repr(value: object, depth: int = 0) -> str:
    if value is None or isinstance(value, bool):
        return kind_of(value)
    if isinstance(value, dict | list | tuple) and value and depth == _MAX_SHOWN_DEPTH:
        return "{...}" if isinstance(value, dict) else "[...]"
    if isinstance(value, dict | set | frozenset) and len(value) > MAX_SHOWN:
        return f"a {type(value).__name__} of {len(value)} entries"
    if isinstance(value, dict):
        entries = (f"{_repr(key, depth + 1)}: {_repr(entry, depth + 1)}" for key, entry in value.items())
        return f"{{{_listed(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{_listed(_repr(entry, depth + 1) for entry in value)}]"
    if depth and isinstance(value, str | bytes) and len(value) > MAX_SHOWN:
        return f"{value[:MAX_SHOWN]!r}..."
    try:
        return repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"a {type(value).__name__} too large to show"


def _listed(entries: Iterator[str]) -> str:
    """Joined by commas, no more of them than can be shown."""
    listed: list[str] = []
    length = 0
    for entry in entries:
        if length > 20 * MAX_SHOWN:
            return ", ".join([*listed, "..."])
        listed.append(entry)
        length += len(entry) + 2
    return ", ".join(listed)


def kind_of(value: object) -> str:
    """What a value is, in words that hold for Python and JSON: 'null', 'a list', 'an object'."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds: tuple[tuple[type, str], ...] = (
        (str, "a text"),
        (int, "a number"),
        (float, "a number"),
        (list, "a list"),
        (tuple, "a list"),
        (dict, "an object"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def shortened(text: str) -> str:
    """The text with the middle left out of a long one."""
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


class LatentrayError(Exception):
    """Base of every error that this project raises on purpose."""

    code: ClassVar[str] = "internal"


class ConfigError(LatentrayError):
    """A flag, keyword or environment variable that cannot work."""

    code = "invalid_config"


class CheckpointError(ConfigError):
    """A checkpoint directory that cannot be served: path, type, tensors."""

    code = "invalid_checkpoint"


class InvalidRequestError(LatentrayError):
    """A request that cannot be served as asked; `field` names the culprit."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(InvalidRequestError):
    """A request for a model that is not served here."""

    code = "model_not_found"


class InvalidApiKeyError(LatentrayError):
    """A call without an API key that the server knows."""

    code = "invalid_api_key"


class UnknownParameterError(InvalidRequestError):
    """A request with a field that nobody here looks at."""

    code = "unknown_parameter"


class ContextLengthError(InvalidRequestError):
    """A prompt, or a prompt with its completion, that does not fit into the context."""

    code = "context_length_exceeded"


class DuplicateRequestError(LatentrayError):
    """A request id that a live request already has."""

    code = "duplicate_request"

    @classmethod
    def of(cls, request_id: str) -> "DuplicateRequestError":
        """The one wording."""
        return cls(
            f"request_id {shown(request_id)} belongs to a live request; "
            "wait for its end, abort it, or send another id"
        )


class OverloadedError(LatentrayError):
    """The queue or the token budget is full; try again later, after `retry_after_s`."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(LatentrayError):
    """No group can serve now: starting, draining or lost."""

    code = "unavailable"


class LetGoError(UnavailableError):
    """The group is drained, not lost: its sequences go on elsewhere, and nobody is to blame."""


class ClusterTooSmallError(UnavailableError):
    """The Ray cluster cannot place the group; the message says which bundle is missing where."""

    code = "cluster_too_small"


class DeadlineExceededError(LatentrayError):
    """The request's deadline has passed or cannot be met."""

    code = "deadline_exceeded"


class AbortedError(LatentrayError):
    """The request was ended on purpose: Abort, a cancelled call, a client that went away."""

    code = "aborted"


class PoisonRequestError(LatentrayError):
    """A request that ends the shards whenever they work on it."""

    code = "poison_request"


class PlanError(LatentrayError):
    """A sparse MLA plan that breaks an invariant or does not fit its tensors."""

    code = "invalid_plan"


class CollectiveError(LatentrayError):
    """A collective that could not complete: a peer is gone or too late."""

    code = "collective_failed"


class ProtocolError(LatentrayError):
    """Two processes of a group disagree about what one of them has sent: a message that cannot be true."""

    code = "protocol"
