"""The process that holds a local Ray: starts its daemons, tells of their deaths, leaves nothing of them.

`local_ray` runs this file as a program, in a session of its own, so that signals of a terminal or to the
driver's process group do not reach Ray. stdin is its lease: when that ends - the driver has closed it, or is
gone, killed even - every process that came from here is killed and every file removed. stdout has a JSON
object a line: {"started": ADDRESS}, {"failed": TEXT}, {"died": NAME, "pid": N, "cause": TEXT}.

It imports the standard library alone: it lives beside every group, and is up in a few milliseconds.
"""

import contextlib
import ctypes
import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_DAEMONS = {"gcs_server": "Ray's control process (GCS)", "raylet": "Ray's process of this node (raylet)"}
"""Without one of these nothing works; by the name of the program."""
_KILL_TIMEOUT_S = 5.0


class Keeper:
    """One local Ray. folder: all of its files; removed at the end. command: starts it and returns."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._folder = folder
        self._log = folder / "start.log"
        self._daemons: dict[int, str] = {}
        self._wake, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with self._log.open("wb") as log:
            self._starter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def run(self) -> None:
        """Until the lease ends."""
        while True:
            readable, _, _ = select.select([0, self._wake], [], [])
            if 0 in readable and not os.read(0, 4096):
                return
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()

    def end(self) -> None:
        """Kill whatever came from here, remove what it leaves."""
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while (found := descendants(os.getpid())) and time.monotonic() < deadline_s:
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap(tell=False)
            time.sleep(0.005)
        shutil.rmtree(self._folder, ignore_errors=True)
        # Shards that were killed while they joined leave their segment; its name begins with the folder's.
        for path in glob.glob(f"/dev/shm/{self._folder.name}-*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _reap(self, *, tell: bool = True) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._starter.pid:
                self._starter.returncode = code
                if tell:
                    self._started(code)
            elif tell and pid in self._daemons:
                say(died=self._daemons[pid], pid=pid, cause=describe_exit(code))

    def _started(self, code: int) -> None:
        addresses = [*self._folder.glob("*/ray_current_cluster")]
        if code != 0 or not addresses:
            say(failed=f"`ray start` {describe_exit(code)}: {_last_lines(self._log)}")
            return
        # Ray's daemons are orphans now, and this process adopts them: it learns how they end.
        for pid in _children(os.getpid()):
            with contextlib.suppress(OSError):
                program = Path(f"/proc/{pid}/comm").read_text().strip()
                if program in _DAEMONS:
                    self._daemons[pid] = _DAEMONS[program]
        say(started=addresses[0].read_text().strip())


def say(**facts: object) -> None:
    """One event, for the driver; nobody may be there to hear it."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(facts) + "\n").encode())


def describe_exit(code: int) -> str:
    """'was killed by SIGKILL', 'ended with exit code 1'; negative codes are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def descendants(pid: int) -> list[int]:
    """Processes started by a process, and by those; not the dead ones that nobody has waited for."""
    found = [pid]
    for parent in found:
        found += _children(parent)
    return found[1:]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, Path(tasks).read_text().split())
    return found


def _last_lines(path: Path, most: int = 2000) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()[-most:]
    return ""


def main() -> None:
    folder, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = Keeper(Path(folder), command)
    try:
        keeper.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keeper.end()


if __name__ == "__main__":
    main()
