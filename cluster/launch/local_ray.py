"""A Ray of this machine alone: loopback only, its own token, its own session, and nothing left of it."""

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kernels_integration.errors import UnavailableError

_KEEPER = Path(__file__).with_name("ray_keeper.py")
_START_TIMEOUT_S = 180.0
"""Ray's own patience with each of its processes is 30 to 60 s."""
_END_TIMEOUT_S = 10.0
_CPUS = 256
"""Only Ray's account, which must not refuse a group on a small machine; workers started ahead follow the
real cores."""
_OBJECT_STORE_BYTES = 128 * 2**20  # only Ray's own small objects pass through it
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Switched off, a node's address is the loopback one, and every daemon listens there alone. Ray does so on
Windows and macOS by itself, hence the name; on Linux it would listen on all addresses."""


class LocalRay:
    """Runs from construction to `close`, or until this process ends, however that happens.

    Errors: UnavailableError when Ray does not start.
    """

    def __init__(self) -> None:
        # A folder of its own keeps `ray.init(address="auto")` of others from finding this cluster, and is
        # for this user alone, whatever modes Ray gives to what lies inside. A short path, because Ray puts
        # Unix sockets there (107 bytes at most).
        base = "/tmp" if Path("/tmp").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="latentray-", dir=base))
        self.token = secrets.token_hex(32)
        """What a process must show to this Ray."""
        self.address = ""
        self.failure: str | None = None
        """Which of Ray's processes has ended before its time, and how; None while all live."""
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_closing = False
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER), str(self.folder), *_start_command(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="ray-keeper", daemon=True)
        self._listener.start()
        try:
            self.address = self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """What the names of its files in shared memory begin with, behind 'latentray-'."""
        return self.folder.name.removeprefix("latentray-")

    def close(self) -> None:
        """End every process and remove every file of it."""
        self._is_closing = True
        assert self._keeper.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._listener.join(1)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        kept |= {_LOOPBACK_VARIABLE: "0", "RAY_USAGE_STATS_ENABLED": "0"}
        if os.environ.get("RAY_AUTH_MODE", "token") == "token":
            kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        return kept

    def _listen(self) -> None:
        assert self._keeper.stdout is not None, "a pipe was asked for"
        for line in self._keeper.stdout:
            event = json.loads(line)
            if "died" in event and not self._is_closing and self.failure is None:
                self.failure = f"{event['died']}, process {event['pid']}, {event['cause']}"
            self._events.put(event)
        if not self._is_closing and self.failure is None:
            self.failure = "the process that keeps the local Ray has ended, and Ray with it"
        self._events.put({"failed": self.failure or "it was stopped"})

    def _await_start(self) -> str:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                event = self._events.get(timeout=0.2)
            except queue.Empty:
                continue
            if "started" in event:
                return str(event["started"])
            why = event.get("failed") or self.failure
            raise UnavailableError(f"a local Ray did not start: {why}")
        raise UnavailableError(
            f"a local Ray did not start within {_START_TIMEOUT_S:g} s; look at what this machine is busy "
            "with, or join a running cluster with --address"
        )


# Nobody connects by ray://, and its server would take a fixed port (10001). `ray start` leaves it out only
# where a package of it is missing.
_START_PROGRAM = """
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
scripts.main()
"""


def _start_command(folder: Path) -> list[str]:
    """`ray start`, of this interpreter's Ray whatever PATH and the current folder hold."""
    return [
        sys.executable,
        "-P",
        "-c",
        _START_PROGRAM,
        "start",
        "--head",
        "--port=0",
        "--dashboard-agent-listen-port=0",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
        f"--num-cpus={_CPUS}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={folder / 'r'}",
        # Ray's own default is 15: whatever else runs on the machine would go first.
        f"--system-config={json.dumps({'worker_niceness': 0})}",
    ]
