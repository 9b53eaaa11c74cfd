"""What a line of a journal may say: other programs and people may have written in it."""

from typing import Any

from cluster.batch.rows import KEY_BYTES

Record = dict[str, Any]


def fault_of(record: Record) -> str | None:
    """Why no journal of ours has this line; None: one may have it. Fields that nobody reads may be any."""
    if "key" in record:
        return _first(
            _text_or_null(record, "custom_id"),
            _key(record),
            _flag(record, "failed"),
            *(_count(record, name) for name in ("run", "start", "size", "crc")),
        )
    if "whole" in record:
        whole = record["whole"]
        if not isinstance(whole, dict):
            return f"whole is {whole!r:.100}; it must be an object"
        return _first(*(_count(whole, name) for name in ("rows", "failed", "bytes")), _run(record))
    if "run" not in record:
        return "it has neither run nor key nor whole"
    return _first(_count(record, "run"), _flag(record, "errors_file", False))


def _first(*faults: str | None) -> str | None:
    return next((fault for fault in faults if fault is not None), None)


def _run(record: Record) -> str | None:
    return _count(record, "run") if "run" in record else None


def _missing(record: Record, name: str, rule: str) -> str:
    if name not in record:
        return f"{name} is missing; it must be {rule}"
    return f"{name} is {record[name]!r:.100}; it must be {rule}"


def _count(record: Record, name: str) -> str | None:
    value = record.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return None
    return _missing(record, name, "a whole number of at least 0")


def _flag(record: Record, name: str, default: bool | None = None) -> str | None:
    return None if isinstance(record.get(name, default), bool) else _missing(record, name, "true or false")


def _text_or_null(record: Record, name: str) -> str | None:
    is_fine = name in record and isinstance(record[name], str | None)
    return None if is_fine else _missing(record, name, "text or null")


def _key(record: Record) -> str | None:
    value = record["key"]
    try:
        is_fine = isinstance(value, str) and len(value) == 2 * KEY_BYTES and len(bytes.fromhex(value)) > 0
    except ValueError:
        is_fine = False
    return None if is_fine else _missing(record, "key", f"{2 * KEY_BYTES} hexadecimal digits")
