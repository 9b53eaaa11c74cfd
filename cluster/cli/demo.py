"""`latentray demo`: what `make demo` runs."""

from contextlib import closing

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.cli.tables import print_table
from cluster.config import ServeArgs, Settings

_DEMO = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "num_speculative_tokens": 3,
    "port": 0,
    "http_port": None,
}
"""What the demo shows, where nothing else is asked for."""


@with_settings(ServeArgs)
def demo(settings: Settings[ServeArgs]) -> None:
    """Start a small local server, stream two answers over gRPC, print what they cost, stop."""
    from cluster.launch.demo import run_demo

    changes = {name: value for name, value in _DEMO.items() if settings.origins[name] == "default"}
    args = settings.args.model_copy(update=changes)
    with closing(ProgressLine()) as progress:
        result = run_demo(
            args,
            progress=lambda message: progress(message) if message else progress.close(),
            show=lambda text: typer.echo(text, nl=False),
        )
    typer.echo()
    print_table(
        ("answer", "tokens", "first token", "tokens/s", "tokens/verify", "accepted drafts 1, 2, 3"),
        [
            (
                answer.title,
                answer.num_tokens,
                f"{answer.ttft_s * 1e3:.0f} ms",
                f"{answer.tokens_per_s:.0f}",
                f"{answer.tokens_per_verify:.2f}",
                ", ".join(f"{share:.0%}" for share in answer.acceptance),
            )
            for answer in result.answers
        ],
    )
    typer.echo()
    print_table(
        ("actor", "resident memory"),
        [(name, f"{num_bytes / 2**20:.0f} MiB") for name, num_bytes in result.memory.items()],
    )
