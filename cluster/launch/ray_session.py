"""The driver's connection to Ray: a cluster of its own on this machine, or one that runs already."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import ray
from ray._private import ray_constants

from kernels_integration.errors import ConfigError, UnavailableError

PACKAGES = ("cluster", "actors", "kernels_integration")
_LOCAL_CPUS = 256
"""Of a local cluster. They are only Ray's account, which must not refuse a group on a small machine;
workers started ahead follow the real cores."""
_OBJECT_STORE_BYTES = 128 * 2**20  # only Ray's own small objects pass through it
_CONNECT_TIMEOUT_S = 5
_JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` for its entrypoint


class RaySession:
    """Connected from construction to `close`.

    A process has one connection to Ray: sessions share it, the last one ends it. One that others made
    (`ray.init` before) is used and left alone.

    address: None joins $RAY_ADDRESS, or starts a local cluster where that is not set; "local" always
    starts one; "auto" or HOST:PORT joins one (this machine must be one of its nodes).
    Errors: ConfigError for a Ray Client address; UnavailableError when no cluster answers.
    """

    _lock = threading.Lock()
    _shared: ClassVar["_Connection | None"] = None

    def __init__(self, address: str | None) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise ConfigError(
                f"address {address} is a Ray Client address; run latentray on a node of the cluster with "
                "--address auto or HOST:PORT (often port 6379), or submit it with `ray job submit`"
            )
        self._is_open = True
        with self._lock:
            if RaySession._shared is None:
                RaySession._shared = _Connection.open(address)
            self._connection = RaySession._shared
            self._connection.num_sessions += 1

    @property
    def is_local(self) -> bool:
        """The cluster is this machine alone and ends with its last session."""
        return self._connection.temp_dir is not None

    def close(self) -> None:
        """Leave; the last session of a cluster of our own ends every process and file of it."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._connection.num_sessions -= 1
            if self._connection.num_sessions == 0:
                RaySession._shared = None
                self._connection.close()


@dataclass(slots=True)
class _Connection:
    is_ours: bool
    temp_dir: Path | None = None
    """Of a cluster that we started."""
    num_sessions: int = 0

    @classmethod
    def open(cls, address: str) -> Self:
        if ray.is_initialized():
            return cls(is_ours=False)
        return cls._start() if address == "local" else cls._join(address)

    @classmethod
    def _start(cls) -> Self:
        # A folder of its own keeps `ray.init(address="auto")` of others from finding this cluster; a
        # short path because Ray puts Unix sockets there (107 bytes at most).
        base = "/tmp" if Path("/tmp").is_dir() else None
        connection = cls(is_ours=True, temp_dir=Path(tempfile.mkdtemp(prefix="latentray-", dir=base)))
        try:
            with _no_uv_workers():
                cls._init(
                    address="local",
                    num_cpus=_LOCAL_CPUS,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(connection.temp_dir),
                    runtime_env=_local_runtime_env(),
                    # Ray's own default is 15: whatever else runs on the machine would go first.
                    _system_config={"worker_niceness": 0},
                )
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def _join(cls, address: str) -> Self:
        try:
            _check_reachable(address)
            cls._init(address=address, runtime_env=_shipped_runtime_env())
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"no Ray cluster can be joined at address {address}: {error}; check that it runs and that "
                "this machine is one of its nodes (`ray status`), or leave --address out for a local one"
            ) from error
        return cls(is_ours=True)

    def close(self) -> None:
        if self.is_ours and ray.is_initialized():
            ray.shutdown()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    @staticmethod
    def _init(**arguments: Any) -> None:
        with _usage_report_off(), _own_sigterm_handler():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _local_runtime_env() -> dict[str, Any] | None:
    """Workers on this machine import the driver's own packages.

    Ray passes on the script's folder and the current one, no other entry of sys.path.
    """
    root = Path(__file__).resolve().parents[2]
    if root == Path(sysconfig.get_paths()["purelib"]).resolve():
        return None
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}


def _shipped_runtime_env() -> dict[str, Any] | None:
    """Nodes of a joined cluster get the driver's packages, whether or not some version lies there.

    A submitted job brings its working directory, or runs from an image that has them.
    """
    if _JOB_CONFIG_VARIABLE in os.environ:
        return None
    modules = [str(Path(sys.modules[name].__file__ or "").parent) for name in PACKAGES]
    return {"py_modules": modules, "excludes": ["__pycache__"]}


def _check_reachable(address: str) -> None:
    """Ray itself tries an address where nobody listens for minutes (327 s with Ray 2.60)."""
    from ray._private.services import canonicalize_bootstrap_address

    found = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError("no running cluster was found on this machine")
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


@contextlib.contextmanager
def _no_uv_workers() -> Iterator[None]:
    """Under `uv run` Ray would start every worker through uv, in a copy of the current folder.

    Workers of a local cluster use this interpreter as it is. Ray reads the variable of that name once, when
    it is imported.
    """
    before = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    try:
        yield
    finally:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = before


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM by one that exits; a handler of the caller's is put back."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _usage_report_off() -> Iterator[None]:
    """No report to the network and no question about it, unless the user chose otherwise."""
    name = "RAY_USAGE_STATS_ENABLED"
    before = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
