"""How a record of the log becomes a line: for people, or a JSON object for programs.

Who logs facts gives them twice: in words, and as `extra={"facts": {...}}` by their names.
"""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime


class TextLines(logging.Formatter):
    """2026-11-30 19:35:01.123 INFO gateway: words. Local time; tracebacks follow on lines of their own."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s {process}: %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonLines(logging.Formatter):
    """One line, always: time (UTC, ISO 8601), level, process, logger, message; then the facts by their names.

    exception: a traceback, with its line ends escaped.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts: Mapping[str, object] = getattr(record, "facts", {})
        entry |= {name: value for name, value in facts.items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


FORMATTERS: Mapping[str, Callable[[str], logging.Formatter]] = {"text": TextLines, "json": JsonLines}
"""By --log-format; each takes the name of the process."""
