"""Rows of OpenAI batch files: one JSON object a line, in and out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.parameter_kinds import is_text
from cluster.errors import outcome
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.answers import error_body
from cluster.openai.bodies import ENDPOINTS, Body, check_model, parse_body
from cluster.openai.endpoints import whole_answer
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, shown

MAX_ROW_BYTES = 16 * 2**20
"""As of a gRPC request: a prompt of a million token ids takes about 7 MiB of it. Longer rows are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A row that can be answered."""

    custom_id: str
    body: Body


class RowError(Exception):
    """A row that cannot be answered; custom_id where the row had one."""

    def __init__(self, cause: LatentrayError, *, custom_id: str | None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.custom_id = custom_id


def parse_row(line: str | bytes, frontend: ModelFrontend, *, line_number: int) -> BatchRow:
    """Errors: RowError: what is wrong with the line (counted from 1), the row or its body."""
    custom_id: str | None = None
    try:
        if len(line) > MAX_ROW_BYTES:
            raise InvalidRequestError(
                f"line {line_number} has more than {MAX_ROW_BYTES} bytes, which is the limit of a row; "
                "split it, or shorten its prompt",
                field="line",
            )
        row = _json_object(line, line_number)
        custom_id = _field(row, "custom_id", str)
        method = row.get("method", "POST")
        if method != "POST":
            raise InvalidRequestError(f"method is {shown(method)}; it must be POST", field="method")
        url = _field(row, "url", str)
        if url not in ENDPOINTS:
            raise InvalidRequestError(
                f"url is {shown(url)}; it must be one of {', '.join(ENDPOINTS)}", field="url"
            )
        body = parse_body(url, _field(row, "body", dict))
        check_model(body, frontend)
    except LatentrayError as error:
        raise RowError(error, custom_id=custom_id) from error
    return BatchRow(custom_id=custom_id, body=body)


def answered_row(
    row: BatchRow, outputs: Sequence[OutputBuilder], frontend: ModelFrontend, *, request_id: str
) -> dict[str, Any]:
    """The output row of a row whose requests have finished."""
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": row.custom_id,
        "response": {
            "status_code": 200,
            "request_id": request_id,
            "body": whole_answer(row.body, outputs, frontend),
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


def _json_object(line: str | bytes, line_number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line {line_number} is not JSON: {error}", field="line") from error
    if not isinstance(row, dict):
        raise InvalidRequestError(
            f"line {line_number} holds a {type(row).__name__}; it must hold one JSON object", field="line"
        )
    return row


def _field(row: dict[str, Any], name: str, kind: type) -> Any:
    word = "text" if kind is str else "an object"
    if name not in row:
        raise InvalidRequestError(f"{name} is missing; it must be {word}", field=name)
    value = row[name]
    if not isinstance(value, kind) or not value or (kind is str and not is_text(value)):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be {word}, not empty", field=name)
    return value
