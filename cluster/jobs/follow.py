"""A job's log, followed to its end over any number of connections."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import EXIT_OK, EXIT_TERMINATED, EXIT_UNAVAILABLE
from kernels_integration.errors import UnavailableError

_PAUSE_S = 1.0
PATIENCE_S = 600.0
"""How long the cluster may be out of reach before a job is given up. The job itself goes on."""


class JobClient(Protocol):
    """What is used of Ray's JobSubmissionClient. Its methods raise whatever the connection does."""

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """From the beginning on, until the job has ended or the connection does."""
        ...

    def get_job_info(self, job_id: str) -> Any: ...

    def get_job_logs(self, job_id: str) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """status: SUCCEEDED, FAILED or STOPPED. message: Ray's, of why."""

    status: str
    exit_code: int
    message: str


async def follow(
    client: JobClient,
    job_id: str,
    write: Callable[[str], None],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobEnd:
    """Write each character of the log once; return when the job has ended.

    Errors: UnavailableError when the cluster was out of reach for PATIENCE_S.
    """
    log = _Log(write)
    reached_s = clock()
    while True:
        try:
            log.rewind()
            async for text in client.tail_job_logs(job_id):
                log.add(text)
                reached_s = clock()
            trouble: Exception | None = None
        except Exception as error:  # of HTTP, websockets, or Ray's own RuntimeError: told if it stays
            trouble = error
        try:
            info = await asyncio.to_thread(client.get_job_info, job_id)
            reached_s = clock()
            if info.status.is_terminal():
                await _add_rest(client, job_id, log)
                return _end(info)
        except Exception as error:
            trouble = error
        if clock() - reached_s > PATIENCE_S:
            raise UnavailableError(
                f"the cluster has been out of reach for {PATIENCE_S:.0f} s ({trouble}); job {job_id} may "
                f"still run: ray job status {job_id}"
            ) from trouble
        await sleep(_PAUSE_S)


class _Log:
    """Each connection tells the log from its beginning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_written = 0
        self._position = 0

    def rewind(self) -> None:
        self._position = 0

    def add(self, text: str) -> None:
        if new := text[max(0, self._num_written - self._position) :]:
            self._write(new)
        self._position += len(text)
        self._num_written = max(self._num_written, self._position)


async def _add_rest(client: JobClient, job_id: str, log: _Log) -> None:
    """What a connection has lost before the end. A log whose node is gone has none."""
    try:
        text = await asyncio.to_thread(client.get_job_logs, job_id)
    except Exception:
        return
    log.rewind()
    log.add(text)


def _end(info: Any) -> JobEnd:
    status, code = str(info.status.value), info.driver_exit_code
    if status == "SUCCEEDED":
        code = EXIT_OK
    elif status == "STOPPED":
        code = EXIT_TERMINATED
    elif code is None:  # it never began, or its node is gone
        code = EXIT_UNAVAILABLE
    elif code < 0:  # ended by a signal
        code = 128 - code
    return JobEnd(status=status, exit_code=code, message=info.message or "")
