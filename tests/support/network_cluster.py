"""A Ray cluster of several nodes on one machine: a network, mount and process namespace per node.

Each node has an address, /tmp/ray and /dev/shm of its own; veth pairs join them to a bridge that is
in a namespace too, so nothing is added to the machine's own network. Needs root and iproute2.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_RAY = Path(sys.executable).with_name("ray")
_ROOT = Path(__file__).parents[2]
_BOOT = """
mkdir -p /tmp/ray "$0"
mount --bind "$0" /tmp/ray
mount -t tmpfs -o size=512m tmpfs /dev/shm
touch "$0/booted"
trap : CHLD
while :; do sleep 3600 & wait $!; done
"""


def missing_requirement() -> str | None:
    """Why this machine cannot run such a cluster; None when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} is missing (package {package})"
    probe = f"lrprobe{os.getpid()}"
    result = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if result.returncode != 0:
        return f"network namespaces are not allowed here: {result.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class NetworkCluster:
    """Nodes 0 (the head), 1, ..., up inside `with`.

    num_cpus: of each node. num_late: of the last nodes, which are no part of Ray's cluster until `join`.
    """

    def __init__(self, folder: Path, *, num_cpus: Sequence[int], num_late: int = 0) -> None:
        self._folder = folder
        self._num_nodes = len(num_cpus)
        self._num_cpus = num_cpus
        self._num_late = num_late
        self._prefix = f"lr{os.getpid() % 10000}n"
        self._shells: list[subprocess.Popen[bytes]] = []

    def address(self, node: int) -> str:
        return f"10.77.9.{10 + node}"

    def run(self, node: int, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, in the test folder; its output is captured.

        The node's own processes do not know the repository: only this command's path has it.
        """
        environment = {**self._environment(), "PYTHONPATH": str(_ROOT)}
        return subprocess.run(
            self._entered(node, *command),
            env=environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start(self, node: int, *command: str) -> "subprocess.Popen[str]":
        """As `run`, without waiting: lines come from its stdout, errors go to a file."""
        environment = {**self._environment(), "PYTHONPATH": str(_ROOT)}
        return subprocess.Popen(
            self._entered(node, *command),
            env=environment,
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "driver.stderr").open("w"),
            text=True,
        )

    def kill(self, node: int) -> None:
        """End every process of a node at once, as a power cut would."""
        os.kill(self._first_process(node), signal.SIGKILL)

    def cut(self, node: int) -> None:
        """Take the node's link down."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "down")

    def __enter__(self) -> "NetworkCluster":
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for node in range(self._num_nodes):
                self._wire(node)
                self._boot(node)
                if node < self._num_nodes - self._num_late:
                    self.join(node)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tear_down()

    @property
    def _switch(self) -> str:
        return f"{self._prefix}sw"

    def _namespace(self, node: int) -> str:
        return f"{self._prefix}{node}"

    def _wire(self, node: int) -> None:
        name = self._namespace(node)
        _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", f"p{node}", "type", "veth", "peer", "name", "eth0",
            "netns", name)  # fmt: skip
        _ip("-n", self._switch, "link", "set", f"p{node}", "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def _boot(self, node: int) -> None:
        """Start the node's first process; the others are entered into its namespaces."""
        home = self._folder / f"ray{node}"
        shell = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(node), "unshare", "--mount", "--pid", "--fork",
             "--mount-proc", "--kill-child", "bash", "-c", _BOOT, str(home)],
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / f"boot{node}.log").open("w"),
        )  # fmt: skip
        self._shells.append(shell)
        deadline_s = time.monotonic() + 10
        while not (home / "booted").exists():
            if time.monotonic() > deadline_s:
                raise RuntimeError((self._folder / f"boot{node}.log").read_text())
            time.sleep(0.02)

    def join(self, node: int) -> None:
        """Start Ray on a node."""
        role = ["--head", "--port=6379", "--include-dashboard=False"]
        if node > 0:
            role = [f"--address={self.address(0)}:6379"]
        result = subprocess.run(
            self._entered(
                node, str(_RAY), "start", *role, f"--node-ip-address={self.address(node)}",
                f"--num-cpus={self._num_cpus[node]}", "--object-store-memory=100000000",
                "--disable-usage-stats",
            ),
            env=self._environment(),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
        )  # fmt: skip
        if result.returncode != 0:
            raise RuntimeError(f"ray start on node {node}: {result.stdout}{result.stderr}")

    def _entered(self, node: int, *command: str) -> list[str]:
        first = str(self._first_process(node))
        return ["nsenter", "--target", first, "--net", "--mount", "--pid", f"--wdns={self._folder}", *command]

    def _first_process(self, node: int) -> int:
        """PID 1 of the node, as the machine sees it: the child of `unshare`, which `ip` became."""
        unshare = self._shells[node].pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        return int(children[0])

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
        return {
            **kept,
            "PATH": f"{_RAY.parent}:{kept['PATH']}",
            # A head started where the user has a token asks for it, a node that joins sends none unless
            # told to; nobody else reaches this network.
            "RAY_AUTH_MODE": "disabled",
        }

    def _tear_down(self) -> None:
        for shell in self._shells:
            shell.kill()  # --kill-child takes the namespace's first process, and with it the rest
            shell.wait()
        for name in [self._switch, *(self._namespace(node) for node in range(self._num_nodes))]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
