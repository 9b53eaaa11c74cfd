"""What every actor process tells about itself."""

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.gcs_watch import end_with_gcs
from actors.logs import LogSettings, start_logging
from actors.transport.network import free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Where an actor runs."""

    node_id: str
    ip: str
    pid: int = 0
    """Its process there."""


def this_node() -> Node:
    """Where this process runs."""
    return Node(
        node_id=ray.get_runtime_context().get_node_id(),
        ip=ray.util.get_node_ip_address(),
        pid=os.getpid(),
    )


class ActorProcess:
    """Base of the actors. Its methods answer while a long call runs: call them in the control group."""

    def __repr__(self) -> str:
        """What Ray's lists, dashboard and log lines call it."""
        return type(self).__name__.removesuffix("Actor").lower()

    def node(self) -> Node:
        return this_node()

    def start_logging(self, settings: LogSettings, name: str) -> None:
        """Log to a file of this name from now on."""
        start_logging(settings, name)

    def end_with_gcs(self, patience_s: float) -> None:
        """Do not outlive Ray's control process."""
        end_with_gcs(patience_s)

    def warm(self) -> Node:
        """Import what the work takes, so that it can begin at once. Where that is."""
        return this_node()

    def free_port(self) -> int:
        """A TCP port of this node's address that nobody listens on now."""
        return free_port(ray.util.get_node_ip_address())

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def clock_ns(self) -> int:
        """The monotonic clock, which spans are recorded by; the processes of a node share it."""
        return time.monotonic_ns()

    def memory(self) -> int:
        """Resident set size in bytes (where /proc is missing: its peak)."""
        statm = Path("/proc/self/statm")
        if statm.exists():
            return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
