"""`latentray serve`: a group and its gateway until a signal."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from types import FrameType
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.log_follower import LogFollower
from cluster.cli.progress_line import ProgressLine
from cluster.config import ServeArgs, Settings
from cluster.launch.signals import ENDING
from kernels_integration.errors import UnavailableError


@with_settings(ServeArgs)
def serve(
    settings: Settings[ServeArgs],
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            min=0,
            help="How long live requests may go on after a signal.",
        ),
    ] = 30.0,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Let it outlive this command, on a running Ray cluster (--address): see `latentray stop`.",
            show_default=False,
        ),
    ] = False,
    name: Annotated[
        str,
        typer.Option("--name", metavar="NAME", help="With --detach: what it is called on the cluster."),
    ] = "latentray",
) -> None:
    """Serve a model over gRPC on Ray.

    Ctrl-C or SIGTERM lets live requests finish; a second one ends at once.
    """
    if detach:
        _detach(settings.args, name)
        return
    from cluster.launch.serving import start_server
    from cluster.report.kv_report import describe_kv_cache
    from cluster.report.memory import describe_memory

    with closing(ProgressLine()) as progress:
        server = start_server(settings.args, progress=progress)
    with server:
        config = server.config
        groups = f"{len(server.groups)} groups, each " if len(server.groups) > 1 else ""
        typer.echo(
            f"latentray: serving {config.served_model_name} at {server.address} "
            f"({groups}tp {config.tensor_parallel_size}, dcp {config.decode_context_parallel_size}, "
            f"{config.num_speculative_tokens} drafts, {config.max_model_len} tokens of context; "
            f"{describe_kv_cache(config)}; started in {progress.elapsed_s:.1f} s)"
        )
        typer.echo(f"latentray: memory: {describe_memory(config, server.memory())}")
        scheme = "http" if settings.args.tls_cert is None else "https"
        if server.http_port is not None:
            http = f"{scheme}://{settings.args.host}:{server.http_port}"
            typer.echo(f"latentray: OpenAI's API at {http}/v1, status page at {http}/status")
        if server.metrics_port is not None:
            url = f"{scheme}://{settings.args.host}:{server.metrics_port}"
            typer.echo(f"latentray: metrics at {url}/metrics")
        if len(server.gateways) > 1:
            typer.echo(f"latentray: gateways at {', '.join(g.reached_at for g in server.gateways)}")
        if server.log_folder is not None:
            typer.echo(f"latentray: logs in {server.log_folder}")
        sys.stdout.flush()
        logs = LogFollower(server.log_folder, sys.stderr)
        stop = _stop_on_signals()
        failure: str | None = None
        while not stop.wait(0.5):
            logs.poll()
            if failure is None and (failure := server.failure) is not None:
                print(f"latentray: not serving: {failure}", file=sys.stderr)
            if failure is not None and not server.is_reachable:
                break  # while the gateway lives it goes on: health tells clients and probes why
        if failure is None:
            print("latentray: stopping", file=sys.stderr)
        server.stop(drain_s=drain_timeout)
        logs.poll()
    if failure is not None:
        raise UnavailableError(failure)


def _detach(args: ServeArgs, name: str) -> None:
    """Errors: ConfigError without a cluster that is there already; as start_detached."""
    from cluster.launch.detached import require_cluster, start_detached
    from cluster.launch.ray_session import RaySession

    with closing(RaySession(require_cluster(args.address))), closing(ProgressLine()) as progress:
        found = start_detached(name, args, progress)
    typer.echo(
        f"latentray: {found.name} is serving at {found.server} (started in {progress.elapsed_s:.1f} s)"
    )
    scheme = "http" if args.tls_cert is None else "https"
    typer.echo(f"latentray: memory: {found.memory}")
    if found.http_port is not None:
        typer.echo(f"latentray: OpenAI's API at {scheme}://{args.host}:{found.http_port}/v1")
    if found.metrics_port is not None:
        typer.echo(f"latentray: metrics at {scheme}://{args.host}:{found.metrics_port}/metrics")
    typer.echo(f"latentray: logs in {found.log_folder}")
    at = f"--address {args.address or 'auto'}"
    typer.echo(
        f"latentray: how it is: latentray status {at} --name {name}; its end: latentray stop {name} {at}"
    )


_ONE_SIGNAL_S = 2.0
"""`timeout`, `uv run` and the like pass a signal on that the whole group has got already; it may be
seen late, because Ray's calls look for signals once a second."""


def _stop_on_signals(clock: Callable[[], float] = time.monotonic) -> threading.Event:
    """Set by the first signal of ENDING; a second one, unless it comes with the first, ends the command."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in ENDING}
    first_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        ending = before[signal.Signals(number)]
        if not stop.is_set():
            first_s = clock()
            stop.set()
        elif callable(ending) and clock() - first_s >= _ONE_SIGNAL_S:
            ending(number, frame)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    return stop
