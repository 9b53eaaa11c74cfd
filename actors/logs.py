"""Where the processes of a run log: a folder that outlives them, a file for each.

Ray's own logs of a local cluster go with its temporary folder. These stay, on each node, under the state
folder of the user that Ray runs as, or where --log-dir says.
"""

import faulthandler
import logging
import logging.handlers
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.log_lines import FORMATTERS
from kernels_integration.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
KEPT_DAYS = 30
_MAX_FILE_BYTES = 64 * 2**20
_NUM_OLDER_FILES = 3
_RUN = re.compile(r"\d{8}-\d{6}-\d+")
_OWN_LOGGERS = ("latentray", "cluster", "actors", "kernels_integration")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Of all processes of one run."""

    run: str
    """The name of its folder; see `new_run`."""
    level: str = "info"
    """One of LEVELS, for our own loggers; those of libraries start at warning."""
    format: str = "text"
    """Of actors.log_lines: text or json."""
    parent: str | None = None
    """The folder of runs; None: `default_parent` of each node."""

    @property
    def folder(self) -> Path:
        """On this node."""
        return (Path(self.parent) if self.parent is not None else default_parent()) / self.run


def new_run() -> str:
    """A name that sorts by time and that no other process of this node takes."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def default_parent() -> Path:
    """$XDG_STATE_HOME/latentray/logs; ~/.local/state/latentray/logs where that is not set."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path(os.path.expanduser("~")) / ".local" / "state"
    return base / "latentray" / "logs"


def check_writable(parent: str) -> None:
    """Errors: ConfigError when no folder of logs can be made there, on this node."""
    try:
        os.makedirs(parent, exist_ok=True)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(0, "permission denied")
    except OSError as error:
        raise ConfigError(
            f"--log-dir {parent} cannot be written: {error.strerror}; pass a folder of yours"
        ) from error


def start_logging(settings: LogSettings, process: str) -> Path | None:
    """Send what this process logs to its file; once, in a process that is ours alone. The file's folder.

    Uncaught exceptions of threads and fatal signals are logged too. Where no file can be had, stderr takes
    it (None): no server fails for its log.
    """
    handler, folder = _handler(settings.folder, process)
    handler.setFormatter(FORMATTERS[settings.format](process))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(settings.level.upper())
    logging.captureWarnings(True)
    faulthandler.enable(handler.stream, all_threads=True)
    threading.excepthook = _log_thread_exception
    return folder


def _handler(folder: Path, process: str) -> tuple[logging.StreamHandler[Any], Path | None]:
    """And the folder that it writes to."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_old_runs(folder.parent, now_s=time.time())
        handler = logging.handlers.RotatingFileHandler(
            folder / f"{process.replace(' ', '-')}.log",
            maxBytes=_MAX_FILE_BYTES,
            backupCount=_NUM_OLDER_FILES,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        print(f"latentray: no log file in {folder}: {error.strerror}", file=sys.stderr, flush=True)
        return logging.StreamHandler(sys.stderr), None
    return handler, folder


def remove_old_runs(parent: Path, *, now_s: float) -> None:
    """Folders of runs that nothing was written to for KEPT_DAYS; other files and folders are left alone."""
    for folder in parent.iterdir():
        if not _RUN.fullmatch(folder.name) or not folder.is_dir() or folder.is_symlink():
            continue
        newest_s = max((file.stat().st_mtime for file in [folder, *folder.iterdir()]), default=now_s)
        if now_s - newest_s > KEPT_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        logging.getLogger("latentray").error("thread %s has ended", name, exc_info=args.exc_value)
