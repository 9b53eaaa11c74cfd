"""The driver's connection to Ray: a cluster of its own on this machine, or one that runs already."""

import contextlib
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

# Ray's hook for `uv run` would start every worker through uv with the current folder as its working
# directory; our workers use this interpreter. Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray

from kernels_integration.errors import ConfigError, UnavailableError

PACKAGES = ("cluster", "actors", "kernels_integration")
_OBJECT_STORE_BYTES = 128 * 2**20  # only Ray's own small objects pass through it
_JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` for its entrypoint


class RaySession:
    """Connected from construction to `close`. One that found Ray initialised leaves it so.

    address: None joins $RAY_ADDRESS, or starts a local cluster where that is not set; "local" always
    starts one; "auto" or HOST:PORT joins one (this machine must be one of its nodes).
    Errors: ConfigError for a Ray Client address; UnavailableError when no cluster answers.
    """

    def __init__(self, address: str | None, *, num_cpus: int) -> None:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address.startswith("ray://"):
            raise ConfigError(
                f"address {address} is a Ray Client address; run latentray on a node of the cluster with "
                "--address auto or HOST:PORT (often port 6379), or submit it with `ray job submit`"
            )
        self.is_local = False
        self._owns_connection = not ray.is_initialized()
        self._temp_dir: Path | None = None
        if not self._owns_connection:
            return
        if address == "local":
            self._start(num_cpus)
        else:
            self._join(address)

    def close(self) -> None:
        """Disconnect; a cluster of our own ends with every process and file of it."""
        if self._owns_connection and ray.is_initialized():
            ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _start(self, num_cpus: int) -> None:
        self.is_local = True
        # A folder of its own keeps `ray.init(address="auto")` of others from finding this cluster; a
        # short path because Ray puts Unix sockets there (107 bytes at most).
        base = "/tmp" if Path("/tmp").is_dir() else None
        self._temp_dir = Path(tempfile.mkdtemp(prefix="latentray-", dir=base))
        try:
            self._init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp_dir),
                runtime_env=_local_runtime_env(),
            )
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        try:
            self._init(address=address, runtime_env=_shipped_runtime_env())
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            raise UnavailableError(
                f"no Ray cluster can be joined at address {address}: {error}; check that it runs and that "
                "this machine is one of its nodes (`ray status`), or leave --address out for a local one"
            ) from error

    @staticmethod
    def _init(**arguments: Any) -> None:
        with _usage_report_off():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _local_runtime_env() -> dict[str, Any] | None:
    """Workers on this machine import the driver's own packages.

    Ray passes on the script's folder and the current one, no other entry of sys.path.
    """
    root = Path(__file__).resolve().parent.parent
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


@contextlib.contextmanager
def _usage_report_off() -> Any:
    """No report to the network and no question about it, unless the user chose otherwise."""
    name = "RAY_USAGE_STATS_ENABLED"
    before = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
