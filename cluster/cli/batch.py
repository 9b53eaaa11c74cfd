"""`latentray batch`: a file of OpenAI batch rows in, one of answers out."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.config import EngineArgs, Settings
from cluster.config.resolve import resolve
from cluster.errors import EXIT_PARTLY_FAILED
from kernels_integration.errors import ConfigError


@with_settings(EngineArgs)
def batch(
    settings: Settings[EngineArgs],
    input_files: Annotated[
        list[str],
        typer.Option("--input", "-i", metavar="FILE", help="JSONL of batch rows; gzip as .gz; - is stdin."),
    ],
    output_files: Annotated[
        list[str],
        typer.Option("--output", "-o", metavar="FILE", help="JSONL of answers; gzip as .gz; - is stdout."),
    ],
    executor: Annotated[
        str, typer.Option("--executor", metavar="NAME", help="ray, or inline: in this process.")
    ] = "ray",
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            "--max-in-flight",
            metavar="N",
            min=1,
            help="Requests handed to the engine at the same time [default: twice --max-num-seqs]",
            show_default=False,
        ),
    ] = None,
    allow_failed_rows: Annotated[
        bool, typer.Option("--allow-failed-rows", help="Exit code 0 although rows have failed.")
    ] = False,
) -> None:
    """Answer a file of OpenAI batch rows.

    Rows go to /v1/chat/completions or /v1/completions. Answers come in the order of the rows; a row that
    fails gets an error row, and the exit code is 3. Until all rows are answered the output is FILE.partial.
    """
    from cluster.answering.engine import start_engine
    from cluster.batch import run_batch
    from cluster.batch.input_file import count_rows, open_input
    from cluster.frontend.front_end import ModelFrontend
    from cluster.report.output_file import open_output
    from cluster.report.progress import progress_bar

    input_file = _only("--input", input_files, "join files by: cat FILES | latentray batch -i - ...")
    output_file = _only("--output", output_files, "copy the file afterwards")
    config = resolve(settings.args)
    frontend = ModelFrontend.of_group(config)
    # Files first: a wrong path should not cost the start of an engine.
    with open_input(input_file) as lines, open_output(output_file, input_path=input_file) as output:
        num_rows = count_rows(input_file)
        with closing(ProgressLine()) as progress:
            engine = start_engine(
                config,
                executor=executor,
                tokenizer=frontend.tokenizer.backend,
                address=settings.args.address,
                trace_file=settings.args.trace,
                progress=progress,
            )
        start_up_s = progress.elapsed_s
        start_s = time.monotonic()
        try:
            with closing(engine), progress_bar("Rows", num_rows, in_logs=True) as bar:
                summary = run_batch(
                    lines,
                    output.write,
                    engine=engine,
                    frontend=frontend,
                    max_in_flight=max_in_flight or 2 * config.max_num_seqs,
                    on_row=bar.advance,
                )
                elapsed_s = time.monotonic() - start_s
        except BaseException:
            _tell(
                f"ended early: {output.num_lines} rows are in {output.where}"
                if output.num_lines
                else "ended early, without a row"
            )
            raise
    _tell(
        f"{summary.num_rows} rows, {summary.num_failed} failed; "
        f"{summary.num_prompt_tokens} prompt tokens, {summary.num_completion_tokens} completion tokens "
        f"in {elapsed_s:.1f} s ({summary.num_completion_tokens / elapsed_s:.1f} completion tokens/s), "
        f"after {start_up_s:.1f} s of start-up"
    )
    if summary.num_failed and not allow_failed_rows:
        raise typer.Exit(EXIT_PARTLY_FAILED)


def _only(flag: str, values: Sequence[str], fix: str) -> str:
    if len(values) != 1:
        raise ConfigError(f"{flag} is given {len(values)} times ({', '.join(values)}); pass one file; {fix}")
    return values[0]


def _tell(message: str) -> None:
    print(f"latentray: {message}", file=sys.stderr, flush=True)
