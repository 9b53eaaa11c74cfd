"""`latentray bench`: how fast, against transformers, and where a step's time goes."""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.cli.tables import print_table
from cluster.config import EngineArgs, Settings


@with_settings(EngineArgs)
def bench(
    settings: Settings[EngineArgs],
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", metavar="N,N,...", help="Requests that run together.")
    ] = "1,8,32",
    drafts: Annotated[
        str, typer.Option("--drafts", metavar="K,K,...", help="Values of --num-speculative-tokens.")
    ] = "0,3",
    input_len: Annotated[int, typer.Option("--input-len", metavar="N", min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[
        int, typer.Option("--output-len", metavar="N", min=2, help="Completion tokens.")
    ] = 128,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Measure transformers in the same run.")
    ] = True,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="A step by operation, inline and on Ray, against the machine's limits."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure throughput and time to first token, and where a step's time goes.

    The group runs on Ray with the given settings; every measurement answers the same held-out text,
    greedily, to the same length. Figures of one run compare; figures of two runs may not.
    """
    from cluster.bench.run import run_bench

    with closing(ProgressLine()) as progress:
        result = run_bench(
            settings.args,
            batch_sizes=_numbers("--batch-sizes", batch_sizes, 1),
            drafts=_numbers("--drafts", drafts, 0),
            input_len=input_len,
            output_len=output_len,
            with_reference=reference,
            with_profile=profile,
            progress=progress,
        )
    if as_json:
        json.dump(asdict(result), sys.stdout, indent=2)
        typer.echo()
        return
    print_table(
        ("batch", "engine", "first token", "tokens/s", "of transformers", "tokens/verify"),
        [
            (
                m.batch_size,
                "transformers" if m.num_drafts is None else f"{m.num_drafts} drafts",
                f"{m.ttft_s * 1e3:.0f} ms",
                f"{m.tokens_per_s:.0f}",
                "" if (ratio := result.ratio(m)) is None else f"{ratio:.2f} x",
                "" if m.tokens_per_verify is None else f"{m.tokens_per_verify:.2f}",
            )
            for m in result.measurements
        ],
    )
    for breakdown in result.breakdowns:
        total_s = sum(seconds for _, seconds in breakdown.parts)
        typer.echo(f"\na step of batch {breakdown.batch_size} with {breakdown.num_drafts} drafts, on rank 0:")
        print_table(
            ("part", "ms", "share"),
            [(name, f"{seconds * 1e3:.2f}", f"{seconds / total_s:.0%}") for name, seconds in breakdown.parts],
        )

    for found in result.profiles:
        total_s = sum(row.seconds for row in found.rows)
        typer.echo(
            f"\na step of batch {found.batch_size} with {found.num_drafts} drafts by operation, "
            f"{found.executor}, on rank 0:"
        )
        assert result.limits is not None
        print_table(
            ("operation", "share", "calls", "us", "MB", "of limit"),
            [
                (
                    row.name,
                    f"{row.seconds / total_s:.1%}",
                    f"{row.calls:.1f}" if row.calls else "",
                    f"{row.seconds * 1e6:.0f}",
                    f"{row.num_bytes / 1e6:.2f}" if row.num_bytes else "",
                    "" if (reached := row.of_limit(result.limits)) is None else f"{reached:.2f}",
                )
                for row in found.rows
            ],
        )
    if result.limits is not None:
        typer.echo(
            f"\nlimits of one thread: {result.limits.bytes_per_s / 1e9:.1f} GB/s read from memory, "
            f"{result.limits.flops_per_s / 1e9:.0f} GFLOP/s in {result.limits.dtype}"
        )


def _numbers(flag: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise typer.BadParameter(f"{flag} is {text!r}; it must be whole numbers >= {least}, such as 1,8,32")
    return numbers
