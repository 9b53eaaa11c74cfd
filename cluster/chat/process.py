"""The process in which templates run, from the side that asks.

A template is a program by a stranger: a macro that calls itself or a filter that pads to a gigabyte ends with
its process, not with ours. The process starts with the first template and stays: a rendering then costs a
message through a pipe and back.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chat.kept import Part
from kernels_integration.errors import InvalidRequestError, UnavailableError

_LENGTH_BYTES = 4
_START = "import sys; sys.path[:] = {path!r}; from cluster.chat.worker import main; main(*{limits!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Of one rendering. memory_bytes: of the process, all of its address space."""

    seconds: float = 10.0
    memory_bytes: int = 2**30
    characters: int = 2**24
    """Of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    prompt: str
    dropped: Part | None
    """The first part of the chat that the prompt does not hold."""


class TemplateProcess:
    """Compiles and renders, one template at a time, for any number of threads.

    It restarts after a template ended it, and ends with this object.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> str | None:
        """What is wrong with a template, None if it compiles."""
        error: str | None = self._ask({"source": source}).get("error")
        return None if error is None else error.partition(": ")[2] or error

    def render(
        self, source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Rendered:
        """A chat's prompt. variables: all but messages, tools among them.

        Errors: InvalidRequestError: the template refuses, fails, or does not end within the limits.
        """
        answer = self._ask({"source": source, "messages": messages, "variables": variables})
        if "error" in answer:
            raise InvalidRequestError(answer["error"], field=answer["field"])
        dropped = answer["dropped"]
        return Rendered(prompt=answer["prompt"], dropped=None if dropped is None else Part(**dropped))

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            body = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages, tools and chat_template_kwargs must be plain data, as JSON has it: {error}",
                field="messages",
            ) from None
        with self._lock:
            try:
                answer = self._exchange(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
            except BaseException:  # also Ctrl-C: a late answer must not be taken for the next one
                self._end()
                raise
            return self._last_words() if answer is None else answer

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
            limits = (self.limits.seconds, self.limits.memory_bytes, self.limits.characters)
            code = _START.format(path=sys.path, limits=limits)
            try:
                # A session of its own: Ctrl-C at a terminal is for this process to handle.
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise UnavailableError(
                    f"no process can be started to render chat templates: {error.strerror}"
                ) from error
            weakref.finalize(self, _kill, self._child)
        return self._child

    def _last_words(self) -> dict[str, Any]:
        assert self._child is not None
        code = self._child.wait()
        self._end()
        if code == -signal.SIGALRM:
            why = f"it takes more than {self.limits.seconds:g} seconds"
        else:
            why = f"its process ended (exit code {code}), which at most {self.limits.memory_bytes} bytes have"
        return {"error": f"the model's chat template failed on these messages: {why}", "field": "messages"}

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
