"""A served model that outlives the command that started it: its driver is a detached actor of Ray's."""

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.logs import start_logging
from cluster.config import ServeArgs
from cluster.config.args import BUNDLED_CHECKPOINT
from cluster.control.command import Command
from cluster.launch.ray_session import NAMESPACE
from cluster.launch.serving import RunningServer, start_server
from cluster.launch.waiting import Progress, answer
from cluster.report.memory import describe_memory
from kernels_integration.errors import ConfigError, LatentrayError, UnavailableError

_PREFIX = "serve/"
_LOOK_S = 0.5
_ASK_TIMEOUT_S = 30.0
_STOP_MARGIN_S = 60.0
"""For the groups to end after the drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a detached deployment tells of itself."""

    name: str
    state: str
    """starting, serving, stopping, or why it cannot serve."""
    server: str = ""
    """host:port of gRPC; "" before it listens."""
    http_port: int | None = None
    metrics_port: int | None = None
    memory: str = ""
    """What its actors took when they had started."""
    log_folder: str = ""


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 8})  # it waits for others
class ServeActor:
    """Holds what `latentray serve` holds: groups, their supervisors and the gateway.

    All of them end with this process. `start` runs in Ray's default group, all else in the control group.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits_for = ""
        self._server: RunningServer | None = None
        self._memory = ""
        self._failure: str | None = None
        self._is_stopping = threading.Event()

    def __repr__(self) -> str:
        """What Ray's lists, dashboard and log lines call it."""
        return f"serve {self._name}"

    def start(self, args: ServeArgs) -> Deployment:
        """Errors: as start_server."""
        server = start_server(_as_here(args), progress=self._note)
        start_logging(server.groups[0].logs, "serve")
        self._memory = describe_memory(server.config, server.memory())
        self._server = server
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self.tell()

    def waits_for(self) -> str:
        """What the start waits for, in words."""
        return self._waits_for

    def tell(self) -> Deployment:
        server = self._server
        if server is None:
            return Deployment(name=self._name, state=self._failure or f"starting: {self._waits_for}")
        failure = self._failure or server.failure
        return Deployment(
            name=self._name,
            state="stopping" if self._is_stopping.is_set() else failure or "serving",
            server=server.address,
            http_port=server.http_port,
            metrics_port=server.metrics_port,
            memory=self._memory,
            log_folder=str(server.log_folder or ""),
        )

    def carry_out(self, command: Command) -> Iterator[str]:
        """What is said while an operator's order is carried out. Errors: as Operator.carry_out."""
        server = self._server
        if server is None:
            raise UnavailableError(f"{self._name} is starting; ask again when it serves")
        said: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                server.operator.carry_out(command, said.put)
                said.put(None)
            except Exception as error:
                said.put(error)

        threading.Thread(target=work, name="order", daemon=True).start()
        while (item := said.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def stop(self, drain_s: float) -> None:
        """Drain, then end the gateway and the groups."""
        self._is_stopping.set()
        if self._server is not None:
            self._server.stop(drain_s=drain_s)

    def _note(self, message: str) -> None:
        self._waits_for = message

    def _watch(self) -> None:
        """A gateway that is lost ends the rest; while it lives it tells clients what has failed."""
        server = self._server
        assert server is not None, "it has started"
        while not self._is_stopping.wait(_LOOK_S):
            if (failure := server.failure) is not None and not server.is_reachable:
                self._failure = failure
                server.stop(drain_s=0)
                return


def require_cluster(address: str | None) -> str:
    """Errors: ConfigError where there is no cluster that could outlive this command."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        raise ConfigError(
            "--detach needs a Ray cluster that outlives this command, and a local one ends with it; start "
            "one with `ray start --head`, and pass --address auto"
        )
    return address


def start_detached(name: str, args: ServeArgs, progress: Progress) -> Deployment:
    """Start a deployment on this node of the cluster that is joined; returns when it serves.

    Errors: ConfigError when the name is taken; as start_server. Nothing is left behind.
    """
    if name in deployments():
        raise ConfigError(
            f"a deployment named {name} runs on this cluster; end it with `latentray stop {name}`, or give "
            "another --name"
        )
    here = ray.get_runtime_context().get_node_id()
    try:
        actor = ServeActor.options(  # type: ignore[attr-defined]
            name=_PREFIX + name,
            namespace=NAMESPACE,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(name)
    except ValueError as error:  # somebody was faster
        raise ConfigError(f"a deployment named {name} was just started: {error}") from error
    try:
        starting = actor.start.remote(_as_there(args))
        told = ""
        while not ray.wait([starting], timeout=1)[0]:
            told = _ask(actor, "waits_for") or told
            progress(told)
        found: Deployment = answer(starting, "the deployment to start", timeout_s=_ASK_TIMEOUT_S)
    except BaseException:
        ray.kill(actor)
        raise
    return found


def deployments() -> list[str]:
    """Names of those on the cluster that is joined."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"].removeprefix(_PREFIX)
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(_PREFIX)
    )


def find(name: str | None) -> tuple[str, Any]:
    """The name and the actor of a deployment. name: None: the only one there is.

    Errors: UnavailableError when there is none; ConfigError for another name, or a missing one.
    """
    names = deployments()
    if not names:
        raise UnavailableError(
            "no detached deployment runs on this cluster; start one with `latentray serve --detach`"
        )
    if name is None and len(names) > 1:
        raise ConfigError(f"several deployments run on this cluster; name one of {', '.join(names)}")
    name = names[0] if name is None else name
    if name not in names:
        raise ConfigError(f"no deployment is named {name}; there are {', '.join(names)}")
    return name, ray.get_actor(_PREFIX + name, namespace=NAMESPACE)


def describe(actor: Any) -> Deployment:
    """Errors: UnavailableError."""
    found: Deployment = _ask(actor, "tell")
    return found


def carry_out(actor: Any, command: Command) -> Iterator[str]:
    """As cluster.control.client.carry_out, of a deployment."""
    stream = actor.carry_out.options(concurrency_group="control", num_returns="streaming").remote(command)
    try:
        for reference in stream:
            yield ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, LatentrayError) else error from error


def stop(actor: Any, name: str, drain_s: float, progress: Progress) -> None:
    """Drain a deployment and end everything of it. One that does not answer is ended without a drain."""
    stopping = actor.stop.options(concurrency_group="control").remote(drain_s)
    for second in range(int(drain_s + _STOP_MARGIN_S)):
        progress(f"waiting for {name} to drain and end ({second} s)")
        if ray.wait([stopping], timeout=1)[0]:
            break
    ray.kill(actor)
    try:
        ray.get(stopping, timeout=_ASK_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise UnavailableError(f"{name} did not end by itself, and was killed: {error}") from error


def _ask(actor: Any, method: str) -> Any:
    asked = getattr(actor, method).options(concurrency_group="control").remote()
    return answer(asked, f"the deployment to say {method}", timeout_s=_ASK_TIMEOUT_S)


_PATHS = ("model", "chat_template", "log_dir", "trace", "api_keys", "tls_cert", "tls_key", "tls_client_ca")


def _as_there(args: ServeArgs) -> ServeArgs:
    """The settings with paths that another process on this node understands."""
    changes: dict[str, Any] = {"address": "auto"}
    for field in _PATHS:
        value = getattr(args, field)
        if value is not None:
            changes[field] = os.path.abspath(os.path.expanduser(value))
    if changes["model"] == str(BUNDLED_CHECKPOINT):
        changes["model"] = _BUNDLED
    return args.model_copy(update=changes)


def _as_here(args: ServeArgs) -> ServeArgs:
    """The inverse. A function of its own: Ray ships an actor's methods with the driver's values in them."""
    if args.model != _BUNDLED:
        return args
    return args.model_copy(update={"model": str(BUNDLED_CHECKPOINT)})


_BUNDLED = "bundled"
"""Where the package lies there, its data does: it is shipped."""
