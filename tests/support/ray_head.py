"""A Ray cluster of one node that others have started: what `--address` joins."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli_process import environment


@dataclass
class RayCluster:
    address: str
    dashboard: str
    env: dict[str, str]

    def ray(self, *argv: str, **more: object) -> subprocess.CompletedProcess[str]:
        argv = (sys.executable, "-m", "ray.scripts.scripts", *argv)
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=240, **more)  # type: ignore[call-overload,no-any-return]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextmanager
def ray_head(num_cpus: int = 4) -> Iterator[RayCluster]:
    """A head of our own, with a token of our own: Ray may find another one in the user's home."""
    folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")  # Ray's sockets need a short path
    token = Path(folder, "token")
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    env = environment(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0"
    )
    port, dashboard_port = free_ports(2)
    head = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", str(num_cpus)),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
            *("--temp-dir", folder, "--object-store-memory", str(100 * 10**6), "--disable-usage-stats"),
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    cluster = RayCluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", env)
    try:
        deadline_s = time.monotonic() + 90
        while cluster.ray("job", "list", "--address", cluster.dashboard).returncode:
            assert head.poll() is None, "the head has ended"
            assert time.monotonic() < deadline_s, "the dashboard does not answer"
            time.sleep(0.5)
        yield cluster
    finally:
        head.terminate()
        try:
            head.wait(30)
        finally:
            if head.poll() is None:
                os.killpg(head.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
