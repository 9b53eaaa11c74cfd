"""Waiting for Ray: never without a word, never without an end, and with our own errors."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions

from kernels_integration.errors import CollectiveError, LatentrayError, UnavailableError

Progress = Callable[[str], None]
"""Called with what is waited for, about once a second."""


@contextmanager
def ticking(progress: Progress, what: str) -> Iterator[None]:
    """Report progress once a second while a call that cannot report blocks this thread."""
    done, start_s = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(1):
            progress(f"waiting for {what} ({time.monotonic() - start_s:.0f} s)")

    progress(f"waiting for {what} (0 s)")
    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def wait_for(
    references: Sequence[Any],
    what: str,
    progress: Progress,
    *,
    timeout_s: float,
    state: Callable[[], str] = lambda: "",
    lacks: Callable[[list[Any]], str] = lambda pending: "",
    failure: Callable[[], str | None] = lambda: None,
) -> list[Any]:
    """The results, in order; the first failure is raised as the error that it is.

    timeout_s: how long nothing may happen: no result, and no change of `state`, which is shown behind
    `what`. lacks: says what the references are that have no result yet. failure: why none will come.
    Errors: those of the calls, and UnavailableError.
    """
    start_s = moved_at_s = time.monotonic()
    pending, seen = list(references), ""
    while pending:
        now_s, is_now = time.monotonic(), state()
        progress(f"waiting for {what}{is_now} ({now_s - start_s:.0f} s)")
        done, still = ray.wait(pending, num_returns=len(pending), timeout=1)
        if done or is_now != seen:
            moved_at_s, seen = now_s, is_now
        pending = still
        failures = [error for reference in done if (error := error_of(reference, what)) is not None]
        if failures:  # where one rank fails, its peers fail in their collectives
            raise min(failures, key=lambda error: isinstance(error, CollectiveError))
        if pending and (why := failure()) is not None:
            raise UnavailableError(f"while waiting for {what}: {why}")
        if pending and time.monotonic() - moved_at_s > timeout_s:
            raise UnavailableError(
                f"waited {timeout_s:g} s for {what}{is_now}, and nothing has happened since; "
                f"{lacks(pending) or f'{len(pending)} of {len(references)} have not answered'}"
            )
    return [ray.get(reference) for reference in references]


def answer(reference: Any, what: str, *, timeout_s: float) -> Any:
    """One result, within timeout_s. Errors: as wait_for."""
    [result] = wait_for([reference], what, lambda message: None, timeout_s=timeout_s)
    return result


def error_of(reference: Any, what: str) -> Exception | None:
    """The failure of a call that is done, as our own error where it is one."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, LatentrayError) else error
    except ray.exceptions.RuntimeEnvSetupError as error:
        return UnavailableError(
            f"while waiting for {what}: a node could not be given latentray's packages: {_first_line(error)}"
        )
    except ray.exceptions.ActorDiedError as error:
        return UnavailableError(f"while waiting for {what}: {why_it_never_lived(error)}")
    except ray.exceptions.RayError as error:
        return UnavailableError(f"while waiting for {what}: {_first_line(error)}")
    return None


def why_it_never_lived(error: ray.exceptions.ActorDiedError) -> str:
    """The reason of an actor that died while it was made; a node without our dependencies, most often."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line for line in lines if line.startswith(("ModuleNotFoundError:", "ImportError:"))]
    where = next((line.removeprefix("ip:").strip() for line in lines if line.startswith("ip:")), "")
    node = f"node {where}" if where else "a node"
    if missing:
        return (
            f"{node} cannot run latentray: {missing[-1]}; install latentray's dependencies there, for the "
            "Python that Ray runs with (`latentray doctor --address ...` looks at every node)"
        )
    return f"a process on {node} died: {lines[-1] if lines else error!r}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
