"""The processes of a joined cluster, whose end this driver sees at once, where Ray takes up to a minute."""

import os
import select
import socket
import struct
import threading
from pathlib import Path

import ray
from ray._common.usage import usage_lib
from ray._private import worker as ray_worker

from actors.transport.network import host_and_port
from actors.transport.server_watch import ServerWatch

_LOOK_S = 0.2
_PATIENCE_S = 0.3
_RESTART_PATIENCE_S = 45.0
"""Where the cluster keeps its state outside the control process, that may be started again. Ray ends every
process that has waited 60 s for it, the driver's too, without a word of ours."""


class JoinedRay:
    """Watches the control process (GCS) and this node's raylet, from `ray.init` to `close`."""

    def __init__(self) -> None:
        node = ray_worker.global_worker.node
        self.failure: str | None = None
        """Which of the two is gone; None while both live."""
        self.is_gcs_lost = False
        """No call of Ray's returns any more."""
        self.gcs_patience_s = _RESTART_PATIENCE_S if _gcs_state_is_kept() else _PATIENCE_S
        self._gcs_address = ray.get_runtime_context().gcs_address
        self._logs = Path(node.get_logs_dir_path())
        self._gcs = ServerWatch(host_and_port(self._gcs_address), patience_s=self.gcs_patience_s)
        self._is_closing = threading.Event()
        watches = [threading.Thread(target=self._watch_gcs, name="gcs-watch", daemon=True)]
        if (raylet := _pid_of_listener(node.raylet_socket_name)) is not None:
            watches.append(
                threading.Thread(target=self._watch_raylet, args=(raylet,), name="raylet-watch", daemon=True)
            )
        self._watches = watches
        for watch in watches:
            watch.start()

    def close(self) -> None:
        self._is_closing.set()
        for watch in self._watches:
            watch.join()

    def _watch_gcs(self) -> None:
        if self._gcs.wait_lost(self._is_closing.is_set):
            self.is_gcs_lost = True
            self._fail(
                f"Ray's control process (GCS) at {self._gcs_address} is gone: it ended, or its node cannot "
                f"be reached (its log, on its node: {self._logs / 'gcs_server.out'})"
            )

    def _watch_raylet(self, pid: int) -> None:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            process = None
        try:
            while process is not None and not select.select([process], [], [], _LOOK_S)[0]:
                if self._is_closing.is_set():
                    return
        finally:
            if process is not None:
                os.close(process)
        if not self._is_closing.is_set():
            self._fail(
                f"Ray's process of this node (raylet), process {pid}, has ended "
                f"(its log: {self._logs / 'raylet.out'})"
            )

    def _fail(self, why: str) -> None:
        """The first one is the cause: a raylet ends without its control process."""
        if self.failure is None:
            self.failure = why


def _gcs_state_is_kept() -> bool:
    """Whether a control process that is started again goes on with what the one before it knew."""
    client = ray_worker.global_worker.gcs_client
    storage: str = usage_lib.get_extra_usage_tags_to_report(client).get("gcs_storage", "memory")
    return storage != "memory"


def _pid_of_listener(path: str) -> int | None:
    """The process behind a Unix socket; None where that cannot be known or watched."""
    if not hasattr(os, "pidfd_open") or not hasattr(socket, "SO_PEERCRED"):
        return None
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(path)
        except OSError:
            return None
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None  # 0: a process of another container
