"""The side of a `BoundedProcess` that answers: questions from stdin, answers to stdout.

A frame is a length of four bytes and that many bytes of JSON. Nothing is trusted to end by itself: a timer
kills the process that takes too long, and the system refuses it more memory than the limit.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

LENGTH_BYTES = 4


def answer(
    compute: Callable[[dict[str, Any]], dict[str, Any]], *, seconds: float, counts_cpu: bool = False
) -> None:
    """Answer until stdin ends, each question in as many seconds, of CPU time where that counts."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    timer = signal.ITIMER_PROF if counts_cpu else signal.ITIMER_REAL
    while (question := _read(questions)) is not None:
        signal.setitimer(timer, seconds)  # its signal has no handler here: it kills
        found = compute(question)
        signal.setitimer(timer, 0)
        body = json.dumps(found).encode()
        answers.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        answers.flush()


def limit_memory(num_bytes: int, *, beyond_present: bool = False) -> None:
    """Of the address space, all of it or what comes to the present one. Where the system has such a limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if beyond_present:
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            num_bytes += num_pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    question: dict[str, Any] = json.loads(stream.read(int.from_bytes(length, "little")))
    return question
