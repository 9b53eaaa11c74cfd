"""OpenAI's error envelope, as recorded: {"error": {"message", "type", "param", "code"}}, all four always."""

from typing import Any

from cluster.errors import outcome
from kernels_integration.errors import LatentrayError

_CODES = {"overloaded": "rate_limit_exceeded"}
"""Codes that OpenAI has another name for; where it has none, ours stand in its place."""


def error_body(error: LatentrayError) -> dict[str, Any]:
    """The body of a failed request."""
    return envelope(
        str(error),
        status=outcome(error).http_status,
        param=getattr(error, "field", None),
        code=_CODES.get(error.code, error.code),
    )


def envelope(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer of this HTTP status. param: the path of the field that is at fault."""
    return {"error": {"message": message, "type": _type(status), "param": param, "code": code}}


def _type(status: int) -> str:
    if status == 429:
        return "requests"
    return "invalid_request_error" if status < 500 else "server_error"
