"""The driver's connection to Ray: a cluster of its own on this machine, or one that runs already."""

import contextlib
import logging
import os
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import ray
from ray import _raylet
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from actors.transport.network import host_and_port
from cluster.launch.joined_ray import JoinedRay
from cluster.launch.local_ray import LocalRay
from cluster.launch.signals import signals_held
from kernels_integration.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

PACKAGES = ("cluster", "actors", "kernels_integration")
NAMESPACE = "latentray"
"""Of the actors' names, as `ray list actors` shows them."""
_CONNECT_TIMEOUT_S = 5
_OPTIONS = {
    # No report to the network and no question about it.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ctrl-C acts on a call of Ray's when so much has passed; Ray's own default is a second.
    "RAY_get_check_signal_interval_milliseconds": "50",
}
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
        return self._connection.local is not None

    @property
    def ends_all(self) -> bool:
        """`close` kills every process of the cluster: it is local, and no other session uses it."""
        return self.is_local and self._connection.num_sessions == 1

    @property
    def failure(self) -> str | None:
        """Which of Ray's own processes has ended before its time; None while all live."""
        return self._connection.failure

    @property
    def can_call(self) -> bool:
        """Whether calls of Ray's return; without its control process, or the one node's raylet, none does."""
        joined = self._connection.joined
        return self.failure is None or (joined is not None and not joined.is_gcs_lost)

    @property
    def gcs_patience_s(self) -> float | None:
        """How long a joined cluster may be without its control process; None: the cluster is local."""
        joined = self._connection.joined
        return joined.gcs_patience_s if joined is not None else None

    @property
    def name(self) -> str:
        """Of a local cluster: segments of shared memory whose names begin with it go with the cluster."""
        local = self._connection.local
        return local.name if local is not None else "shared"

    def abandon(self) -> None:
        """End what is left of a local Ray that has lost one of its processes; still to be closed."""
        if self._connection.local is not None:
            self._connection.local.close()

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
    local: LocalRay | None = None
    """The cluster, where we started it."""
    token: "_Token | None" = None
    joined: JoinedRay | None = None
    """What watches a cluster that others started."""
    num_sessions: int = 0

    @classmethod
    def open(cls, address: str) -> Self:
        if ray.is_initialized():
            return cls(is_ours=False, joined=JoinedRay())
        return cls._start() if address == "local" else cls._join(address)

    @classmethod
    def _start(cls) -> Self:
        local = LocalRay()
        connection = cls(is_ours=True, local=local, token=_Token(local.token))
        try:
            with _no_uv_workers(), _loopback_address():
                cls._init(
                    _root() or local.folder,
                    address=local.address,
                    runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
                )
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def _join(cls, address: str) -> Self:
        try:
            _check_reachable(address)
            with tempfile.TemporaryDirectory(prefix="latentray-") as empty:
                runtime_env = _shipped_runtime_env()
                cls._init(Path(empty) if runtime_env else None, address=address, runtime_env=runtime_env)
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(
                f"no Ray cluster can be joined at address {address}: {error}; check that it runs and that "
                "this machine is one of its nodes (`ray status`), or leave --address out for a local one"
            ) from error
        return cls(is_ours=True, joined=JoinedRay())

    @property
    def failure(self) -> str | None:
        keeper = self.local or self.joined
        return keeper.failure if keeper is not None else None

    def close(self) -> None:
        with signals_held():
            if self.joined is not None:
                self.joined.close()
            if self.is_ours and ray.is_initialized():
                ray.shutdown()
            if self.local is not None:
                self.local.close()
            if self.token is not None:
                self.token.restore()

    @staticmethod
    def _init(import_folder: Path | None, **arguments: Any) -> None:
        """import_folder: where workers look for modules before all else; None: Ray's own choice."""
        # Ray would print what happens to its processes to stdout, among answers. We tell it ourselves.
        ray_worker.print_to_stdstream = _log_ray_message
        with _ray_options(), _signals_stay(), _current_folder(import_folder):
            ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **arguments)


def _log_ray_message(data: Mapping[str, Any], *_: object, **__: object) -> None:
    for line in data.get("lines", ()):
        logger.info("ray: %s", line)


def _root() -> Path | None:
    """The folder that the driver's own packages lie in; None where they are installed."""
    root = Path(__file__).resolve().parents[2]
    return None if root == Path(sysconfig.get_paths()["purelib"]).resolve() else root


def _python_path() -> str:
    """For workers on this machine: the driver's own packages, then what else it was told of."""
    ours = [] if (root := _root()) is None else [str(root)]
    return os.pathsep.join([*ours, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


@contextlib.contextmanager
def _current_folder(folder: Path | None) -> Iterator[None]:
    """Be elsewhere for a moment.

    `ray.init` hands the current folder on to all workers, where it goes before everything else in sys.path:
    a `cluster` or `actors` folder in it would be imported in place of ours. There is no option for it.
    """
    if folder is None:
        yield
        return
    before = os.open(".", os.O_RDONLY)  # a folder that was removed has no name to come back by
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


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
    socket.create_connection(host_and_port(found), timeout=_CONNECT_TIMEOUT_S).close()


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
def _loopback_address() -> Iterator[None]:
    """Let Ray take this node's address to be the loopback one: it turns 127.0.0.1 into another else."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _signals_stay() -> Iterator[None]:
    """`ray.init` would replace the handler of SIGTERM; the caller's stays, and acts when it is done."""
    before = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        with signals_held():
            yield
    finally:
        ray_utils.set_sigterm_handler = before


@contextlib.contextmanager
def _ray_options() -> Iterator[None]:
    """What `ray.init` reads from the environment, unless the user chose otherwise."""
    ours = {name: value for name, value in _OPTIONS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


class _Token:
    """The token of a local Ray, which this process shows while it is connected; its environment tells Ray."""

    def __init__(self, token: str) -> None:
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        self._before = {name: os.environ.get(name) for name in names}
        if (self._before["RAY_AUTH_MODE"] or "token") == "token":
            self._set({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})

    def restore(self) -> None:
        self._set(self._before)

    @staticmethod
    def _set(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Both are read once and kept.
        _raylet.Config.initialize("")  # type: ignore[attr-defined]
        _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
