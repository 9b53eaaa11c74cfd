"""A process that answers one question at a time within limits: for work that a stranger's text decides.

What takes too long or too much memory ends that process, not ours. It starts with the first question and
stays: a question then costs a message through a pipe and back.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from kernels_integration.errors import UnavailableError

_LENGTH_BYTES = 4
_START = "import sys; sys.path[:] = {path!r}; from {module} import main; main(*{arguments!r})"


class BoundedProcess:
    """Asks a worker, which is `main(*arguments)` of a module and answers by `cluster.bounded_worker.answer`.

    For any number of threads. It restarts after a question ended it, and ends with this object.
    """

    def __init__(self, module: str, arguments: tuple[object, ...], *, purpose: str) -> None:
        """arguments: of literals. purpose: the end of the message "no process can be started ..."."""
        self._code = _START.format(path=sys.path, module=module, arguments=arguments)
        self._purpose = purpose
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._end()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | int:
        """The worker's answer; its exit code where it ended instead (-signal.SIGALRM: out of time).

        Errors: TypeError, ValueError, RecursionError for a question that is no plain data; UnavailableError.
        """
        body = json.dumps(question, ensure_ascii=False).encode()  # a lone surrogate is no text, and ends here
        with self._lock:
            try:
                answer = self._exchange(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
            except BaseException:  # also Ctrl-C: a late answer must not be taken for the next one
                self._end()
                raise
            return self._exit_code() if answer is None else answer

    def _exchange(self, frame: bytes) -> dict[str, Any] | None:
        """None when the process ended instead of answering."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(frame)
            child.stdin.flush()
        length = child.stdout.read(_LENGTH_BYTES)
        body = child.stdout.read(int.from_bytes(length, "little"))
        if len(length) < _LENGTH_BYTES or len(body) < int.from_bytes(length, "little"):
            return None
        answer: dict[str, Any] = json.loads(body)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            try:
                # A session of its own: Ctrl-C at a terminal is for this process to handle.
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-c", self._code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise UnavailableError(
                    f"no process can be started {self._purpose}: {error.strerror}"
                ) from error
            weakref.finalize(self, _kill, self._child)
        return self._child

    def _exit_code(self) -> int:
        assert self._child is not None
        code = self._child.wait()
        self._end()
        return code

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _kill(child)


def is_out_of_time(exit_code: int) -> bool:
    return exit_code in (-signal.SIGALRM, -signal.SIGPROF)


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
