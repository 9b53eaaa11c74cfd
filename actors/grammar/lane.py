"""A thread on which grammars are compiled and followed: a step waits for it, and not for ever.

xgrammar leaves Python's lock while it works, and cannot be interrupted. So a call that takes too much CPU
time is given up: it goes on on a thread that nobody waits for, and another takes the calls behind it.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_END_S = 5.0
"""Of wall time for the calls that run when a lane ends; those that take longer are left."""
POLL_S = 0.05
"""Of wall time between looks at the CPU time of a call that is not done."""


class Lane:
    """Runs calls one by one, in the order in which they are given. Its thread starts with the first.

    For one caller's thread. Calls must not hold the lane, and end with it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runners: list[_Runner] = []
        """Of those that are alive, the last runs the calls; the others have been given up."""
        weakref.finalize(self, _end, self._calls, self._runners)

    def submit(self, compute: Callable[[], T], *, cpu_s: float) -> "Future[T]":
        """Have it run, with at most so much CPU time; `result` gives what came of it."""
        if not self._runners:
            self._runners.append(_Runner(self._calls))
        call = _Call(compute, cpu_s)
        self._calls.put(call)
        return call.future

    def result(self, future: "Future[T]") -> T:
        """Wait for a call of this lane. Errors: its own; TimeoutError where it was not done in time."""
        while not _is_done(future):
            if self._runners[-1].give_up_if_late():
                self._runners.append(_Runner(self._calls))
        return future.result()

    @property
    def num_given_up(self) -> int:
        """Calls that were given up and still run."""
        self._runners[:-1] = [runner for runner in self._runners[:-1] if runner.thread.is_alive()]
        return len(self._runners[:-1])


def _end(calls: "SimpleQueue[_Call | None]", runners: "list[_Runner]") -> None:
    """A thread that comes back from xgrammar while Python ends would abort the process: wait a while."""
    calls.put(None)
    end = time.monotonic() + MAX_END_S
    for runner in runners:
        if runner.thread is not threading.current_thread():
            runner.thread.join(max(0.0, end - time.monotonic()))


def _is_done(future: "Future[Any]") -> bool:
    try:
        future.exception(timeout=POLL_S)
    except TimeoutError:
        return future.done()
    return True


class _Call:
    def __init__(self, compute: Callable[[], Any], cpu_s: float) -> None:
        self.compute = compute
        self.cpu_s = cpu_s
        self.future: Future[Any] = Future()


class _Runner:
    """A thread, and the call that it runs now."""

    def __init__(self, calls: "SimpleQueue[_Call | None]") -> None:
        self._calls = calls
        self._lock = threading.Lock()
        """Of who ends the present call: the thread, or whoever gives it up."""
        self._present: _Call | None = None
        self._began = 0.0
        self._given_up = threading.Event()
        self.thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self.thread.start()

    def give_up_if_late(self) -> bool:
        """Whether the present call has had its time: it fails (TimeoutError), and the thread ends with it."""
        with self._lock:
            call = self._present
            if call is None or self._cpu_time() - self._began <= call.cpu_s:
                return False
            self._given_up.set()
            call.future.set_exception(TimeoutError(f"it took more than {call.cpu_s:g} s of CPU time"))
            return True

    def _run(self) -> None:
        while not self._given_up.is_set() and (call := self._calls.get()) is not None:
            with self._lock:
                self._began, self._present = self._cpu_time(), call
            try:
                value, error = call.compute(), None
            except BaseException as caught:  # it is the caller's
                value, error = None, caught
            with self._lock:
                self._present = None
                if self._given_up.is_set():
                    logger.warning("a call of xgrammar that was given up has ended")
                elif error is None:
                    call.future.set_result(value)
                else:
                    call.future.set_exception(error)
            del call, value, error  # while it waits for the next one

    def _cpu_time(self) -> float:
        """Of the thread, in seconds; wall time where the system has no such clock for others."""
        if not hasattr(time, "pthread_getcpuclockid") or self.thread.ident is None:
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))
