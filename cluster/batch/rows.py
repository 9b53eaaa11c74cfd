"""Rows of OpenAI batch files: one JSON object a line, in and out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.parameter_kinds import is_text
from cluster.errors import outcome
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.bodies import ENDPOINTS, Body, check_model, parse_body
from cluster.openai.endpoints import whole_answer
from cluster.openai.error_body import error_body
from cluster.openai.strict_json import json_object
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, shortened, shown

MAX_ROW_BYTES = 16 * 2**20
"""As of a gRPC request: a prompt of a million token ids takes about 7 MiB of it. Longer rows are refused."""
KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """A row as it was read: of an input too long for a row, the beginning alone."""

    line: str | bytes
    place: str
    """Where it stands, in messages: "line 3", "part-2.jsonl line 3"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """A row of which is known what it asks for, though not whether that can be answered.

    custom_id: None where there is none that may stand for the row. key: KEY_BYTES bytes, the same for rows of
    the same members (custom_id, url, body) in whatever order and spacing. value: the row, or why it is none.
    """

    custom_id: str | None
    key: bytes
    value: dict[str, Any] | InvalidRequestError


def know(row: InputRow) -> KnownRow:
    """Never fails: a row that is none is one that will be answered with its fault."""
    try:
        value = _json_object(row)
        text = _canonical(value, row.place)
    except InvalidRequestError as error:
        line = row.line.encode(errors="surrogatepass") if isinstance(row.line, str) else row.line
        return KnownRow(custom_id=None, key=digest(line), value=error)
    custom_id = value.get("custom_id")
    return KnownRow(
        custom_id=custom_id if isinstance(custom_id, str) and custom_id and is_text(custom_id) else None,
        key=digest(text.encode()),
        value=value,
    )


def parse_row(row: KnownRow, frontend: ModelFrontend) -> Body:
    """The body of a row. Errors: InvalidRequestError: what is wrong with the row or its body."""
    value = row.value
    if isinstance(value, InvalidRequestError):
        raise value
    _field(value, "custom_id", str)
    _refuse_unknown(value)
    method = value.get("method", "POST")
    if method != "POST":
        raise InvalidRequestError(f"method is {shown(method)}; it must be POST", field="method")
    url = _field(value, "url", str)
    if url not in ENDPOINTS:
        raise InvalidRequestError(
            f"url is {shown(url)}; it must be one of {', '.join(ENDPOINTS)}", field="url"
        )
    body = parse_body(url, _field(value, "body", dict))
    check_model(body.model, frontend)
    return body


def answered_row(
    custom_id: str,
    body: Body,
    outputs: Sequence[OutputBuilder],
    frontend: ModelFrontend,
    *,
    request_id: str,
) -> dict[str, Any]:
    """The output row of a row whose requests have finished."""
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": {
            "status_code": 200,
            "request_id": request_id,
            "body": whole_answer(body, outputs, frontend),
        },
        "error": None,
    }


def failed_row(error: LatentrayError, *, custom_id: str | None, request_id: str) -> dict[str, Any]:
    """The output row of a request that has no answer: response and error both say why."""
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": {
            "status_code": outcome(error).http_status,
            "request_id": request_id,
            "body": error_body(error),
        },
        "error": {"code": error.code, "message": str(error)},
    }


def digest(data: bytes) -> bytes:
    """KEY_BYTES of a cryptographic hash."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def _canonical(value: dict[str, Any], place: str) -> str:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError as error:  # Python reads a little deeper than it writes
        raise InvalidRequestError(f"{place} is nested too deeply", field="line") from error


def _json_object(row: InputRow) -> dict[str, Any]:
    if len(row.line) > MAX_ROW_BYTES:
        raise InvalidRequestError(
            f"{row.place} has more than {MAX_ROW_BYTES} bytes, which is the limit of a row; "
            "split it, or shorten its prompt",
            field="line",
        )
    return json_object(row.line, what=row.place, field="line")


_KEYS = ("custom_id", "method", "url", "body")


def _refuse_unknown(row: dict[str, Any]) -> None:
    """A parameter beside the body would have no effect."""
    for name in row:
        if name not in _KEYS:
            raise InvalidRequestError(
                f"{shown(name)} is no key of a row; they are {', '.join(_KEYS)}: put a request's parameters "
                "into body",
                field=shortened(name),
            )


def _field(row: dict[str, Any], name: str, kind: type) -> Any:
    word = "text" if kind is str else "an object"
    if name not in row:
        raise InvalidRequestError(f"{name} is missing; it must be {word}", field=name)
    value = row[name]
    if not isinstance(value, kind) or not value or (kind is str and not is_text(value)):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be {word}, not empty", field=name)
    return value
