"""What an actor died of, in one clause: 'it was killed by SIGSEGV'."""

import re
from pathlib import Path

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.launch.members import Member

_READ_TIMEOUT_S = 1.5
_TAIL_BYTES = 16 * 1024
_OUT_OF_MEMORY = re.compile(r"NODE_OUT_OF_MEMORY|running low on memory")
"""Ray's own kill. Its text for any other death speaks of OOM killers too, as one of many causes."""
_NODE_DIED = re.compile(r"node.{0,200}(has died|was terminated|is dead|has been marked dead)", re.DOTALL)
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""faulthandler's words, and the signal that it caught."""


def cause_of_death(error: Exception, member: Member, log_file: Path | None) -> str:
    """From what Ray tells, and from the last words that the process has written to its log.

    error: what its `run` call has raised. log_file: on its node; None: it has none.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause or error
        return f"{type(cause).__name__}: {cause}"
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError) or _OUT_OF_MEMORY.search(text):
        return f"Ray's memory monitor killed it: node {member.node.ip} ran out of memory"
    if isinstance(error, ray.exceptions.NodeDiedError) or _NODE_DIED.search(text):
        return f"its node {member.node.ip} died, or cannot be reached"
    if isinstance(error, ray.exceptions.RayActorError):
        words = _last_words(member, log_file)
        for name, signal_name in _FATAL.items():
            if f"Fatal Python error: {name}" in words:
                return f"it was killed by {signal_name}; its log tells where ({log_file})"
        if "INTENDED" in text or "ray.kill" in text:
            return "it was stopped"
        return "it was killed by SIGKILL: by hand, or by the kernel for want of memory"
    return next((line for line in text.splitlines() if line.strip()), repr(error))


def _last_words(member: Member, log_file: Path | None) -> str:
    if log_file is None:
        return ""
    if member.node.node_id == ray.get_runtime_context().get_node_id():
        return _tail(log_file)
    try:
        read = _tail_there.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(member.node.node_id, soft=False)
        )
        words: str = ray.get(read.remote(log_file), timeout=_READ_TIMEOUT_S)
    except Exception:  # its node may be gone with it; this is only for a better message
        return ""
    return words


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _tail_there(path: Path) -> str:
    return _tail(path)
