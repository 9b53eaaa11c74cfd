"""Is this machine able to serve this configuration? Each check answers by itself and never raises."""

import functools
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from actors.model_location import to_portable
from cluster.config import ServeArgs
from cluster.config.resolve import resolve
from cluster.config.sizes import format_size
from cluster.report.memory import MORE_MEMORY, memory_check, num_parameters
from cluster.report.node_check import NodeFacts, look
from kernels_integration.errors import LatentrayError

Status = Literal["ok", "warn", "fail"]

DISTRIBUTIONS = (
    "aiohttp",
    "cryptography",
    "fsspec",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "jinja2",
    "msgspec",
    "numpy",
    "prometheus-client",
    "protobuf",
    "pydantic",
    "pyyaml",
    "pyzmq",
    "ray",
    "rich",
    "safetensors",
    "smg-grpc-proto",
    "tokenizers",
    "torch",
    "typer",
    "xxhash",
)
"""What latentray needs; on a cluster where it is not installed itself, there is no metadata to ask."""

_MIN_SHARED_MEMORY_BYTES = 256 * 2**20
_NODE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found, and what to do about it."""

    name: str
    status: Status
    detail: str


def run_checks(args: ServeArgs) -> Iterator[Check]:
    """Each check as soon as it is done."""
    yield _python()
    yield _packages()
    yield _guarded("torch", _torch)
    yield _guarded("checkpoint", lambda: _checkpoint(args))
    yield _guarded("backend", lambda: _backend(args))
    yield _guarded("tokenizer", lambda: _tokenizer(args))
    yield _guarded("memory", lambda: _memory(args))
    yield _guarded("shared memory", _shared_memory)
    yield _guarded("port", lambda: _port(args))
    yield from _all_guarded("ray", _ray(args))


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except LatentrayError as error:
        return Check(name=name, status="fail", detail=str(error))
    except Exception as error:  # a broken package can raise anything: that is what is asked here
        return Check(name=name, status="fail", detail=f"{type(error).__name__}: {error}")


def _all_guarded(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    """Each check until one breaks, and then what broke it."""
    while True:
        try:
            check = next(checks)
        except StopIteration:
            return
        except Exception as error:
            yield _guarded(name, functools.partial(_raise, error))
            return
        yield check


def _raise(error: Exception) -> Check:
    raise error


def _python() -> Check:
    """Older ones cannot read these files; pip refuses them by requires-python."""
    return Check(name="python", status="ok", detail=f"{platform.python_version()}, {sys.executable}")


def _packages() -> Check:
    missing = []
    for name in DISTRIBUTIONS:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check(
            name="packages",
            status="fail",
            detail=f"missing: {', '.join(missing)}; install them with pip install {' '.join(missing)}",
        )
    return Check(name="packages", status="ok", detail=f"all {len(DISTRIBUTIONS)} are installed")


def _torch() -> Check:
    import torch

    return Check(
        name="torch", status="ok", detail=f"{torch.__version__}, {torch.get_num_threads()} CPU threads"
    )


def _checkpoint(args: ServeArgs) -> Check:
    config = resolve(args)
    return Check(
        name="checkpoint",
        status="ok",
        detail=f"{config.model_path}: {num_parameters(config) / 1e6:.1f} M parameters, "
        f"{config.num_speculative_tokens} drafts, {config.max_model_len} tokens of context",
    )


def _backend(args: ServeArgs) -> Check:
    """What would compute the model on this machine, and a sentence for each backend that could not."""
    from actors.model.config import ModelConfig
    from actors.shard.build import backend_needs
    from kernels_integration import registry

    config = resolve(args)
    needs = backend_needs(config, ModelConfig.from_pretrained(config.model_path))
    choice = registry.choose(config.attention_backend, needs)
    others = [
        registry.refusal(name, needs) or f"{name} can be used too"
        for name in registry.BACKENDS
        if name != choice.name
    ]
    return Check(name="backend", status="ok", detail="; ".join([f"{choice.name} on {needs.device}", *others]))


def _tokenizer(args: ServeArgs) -> Check:
    from cluster.frontend.front_end import ModelFrontend

    config = resolve(args)
    frontend = ModelFrontend.of_group(config)
    if not frontend.tokenizer.renders_chats:
        return Check(
            name="tokenizer",
            status="warn",
            detail="no chat template: chats are refused; add chat_template.jinja to the checkpoint",
        )
    return Check(name="tokenizer", status="ok", detail=f"{frontend.vocab_size} tokens, chat template")


def _memory(args: ServeArgs) -> Check:
    fits, detail = memory_check(resolve(args), args.address, args.num_groups)
    if not fits:
        return Check(name="memory", status="fail", detail=f"{detail}; {MORE_MEMORY}")
    return Check(name="memory", status="ok", detail=detail)


def _shared_memory() -> Check:
    free = shutil.disk_usage("/dev/shm").free
    if not os.access("/dev/shm", os.W_OK) or free < _MIN_SHARED_MEMORY_BYTES:
        return Check(
            name="shared memory",
            status="fail",
            detail=f"/dev/shm has {format_size(free)} for us; Ray and the shards of one node need "
            f"{format_size(_MIN_SHARED_MEMORY_BYTES)} (containers: --shm-size=1g)",
        )
    return Check(name="shared memory", status="ok", detail=f"{format_size(free)} in /dev/shm")


def _port(args: ServeArgs) -> Check:
    from cluster.gateway.server import require_free_ports

    ports = args.ports_by_flag()
    require_free_ports(args.host, ports)
    told = [
        f"{port} is free" if port else "serve takes a free one" for port in ports.values() if port is not None
    ]
    return Check(name="port", status="ok", detail=f"{args.host}: {', '.join(told)}")


def _ray(args: ServeArgs) -> Iterator[Check]:
    """Join the cluster that would be joined, and look at every node; a local one is not started for this."""
    if (args.address or os.environ.get("RAY_ADDRESS") or "local") == "local":
        version, num_cpus = importlib.metadata.version("ray"), os.cpu_count() or 1
        detail = f"{version}; serve starts a local cluster, with {num_cpus} cores of this machine"
        if num_cpus < args.num_groups * args.tensor_parallel_size:
            detail += f": fewer than shards, --tensor-parallel-size {args.tensor_parallel_size}"
            detail += f" in each of --num-groups {args.num_groups}" if args.num_groups > 1 else ""
            yield Check(name="ray", status="warn", detail=detail)
        else:
            yield Check(name="ray", status="ok", detail=detail)
        return
    from cluster.launch.ray_session import RaySession

    with closing(RaySession(args.address)):
        yield _room(args)
        yield from _nodes(args)


def _room(args: ServeArgs) -> Check:
    """Whether `serve` would find room for the group and its gateway now."""
    import ray

    from cluster.launch import placement

    bundles = args.num_groups * placement.bundles_of(args.tensor_parallel_size, args.threads or 1)
    bundles.append(placement.gateway_bundle(ray.get_runtime_context().get_node_id()))
    shortage = placement.describe_shortage(bundles, placement.node_capacities())
    fits = "fits on no node" not in shortage
    return Check(name="ray", status="ok" if fits else "fail", detail=f"joined; {shortage}")


def _nodes(args: ServeArgs) -> Iterator[Check]:
    """One check for each node that lives, by a process there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config = to_portable(resolve(args), "cluster")
    model_path = None if config.model_path.startswith("package:") else config.model_path
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            reference = task.options(scheduling_strategy=on_node).remote(DISTRIBUTIONS, model_path)
            asked[node["NodeManagerAddress"]] = reference
    for ip, reference in asked.items():
        yield _guarded(f"node {ip}", functools.partial(_node, ip, reference, model_path))


def _node(ip: str, reference: Any, model_path: str | None) -> Check:
    from cluster.launch.waiting import answer

    facts: NodeFacts = answer(reference, f"a process on node {ip}", timeout_s=_NODE_TIMEOUT_S)
    detail = (
        f"Python {facts.python}, {format_size(facts.memory_bytes)} of memory and "
        f"{format_size(facts.shared_memory_bytes)} of shared memory are free"
    )
    wrong = []
    if facts.missing:
        names = " ".join(facts.missing)
        wrong.append(
            f"missing packages: {names}; install them there: {facts.executable} -m pip install {names}"
        )
    if not facts.has_model:
        wrong.append(f"no checkpoint at {model_path}; it must lie at the same path on every node")
    if facts.shared_memory_bytes < _MIN_SHARED_MEMORY_BYTES:
        wrong.append("too little in /dev/shm (containers: --shm-size=1g)")
    return Check(name=f"node {ip}", status="fail" if wrong else "ok", detail="; ".join([*wrong, detail]))
