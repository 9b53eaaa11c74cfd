"""`latentray batch`: a file of OpenAI batch rows in, one of answers out."""

import sys
from contextlib import closing
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.config import EngineArgs, Settings
from cluster.errors import EXIT_PARTLY_FAILED


@with_settings(EngineArgs)
def batch(
    settings: Settings[EngineArgs],
    input_file: Annotated[
        str, typer.Option("--input", "-i", metavar="FILE", help="JSONL of batch rows; - is stdin.")
    ],
    output_file: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="JSONL of answers; - is stdout.")
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
) -> None:
    """Answer a file of OpenAI batch rows.

    Rows go to /v1/chat/completions or /v1/completions. Answers come in the order of the rows; a row that
    fails gets an error row, and the exit code is 3. Until all rows are answered the output is FILE.partial.
    """
    from cluster.answering.engine import start_engine
    from cluster.batch import run_batch
    from cluster.batch.files import count_rows, open_input, open_output
    from cluster.frontend.front_end import ModelFrontend
    from cluster.report.progress import progress_bar

    config = settings.args.resolve()
    frontend = ModelFrontend.of_group(config)
    # Files first: a wrong path should not cost the start of an engine.
    with open_input(input_file) as lines, open_output(output_file, input_path=input_file) as write:
        with closing(ProgressLine()) as progress:
            engine = start_engine(
                config,
                executor=executor,
                tokenizer=frontend.tokenizer.backend,
                address=settings.args.address,
                trace_file=settings.args.trace,
                progress=progress,
            )
        with closing(engine), progress_bar("Rows", count_rows(input_file)) as bar:
            summary = run_batch(
                lines,
                write,
                engine=engine,
                frontend=frontend,
                max_in_flight=max_in_flight or 2 * config.max_num_seqs,
                on_row=bar.advance,
            )
    print(
        f"latentray: {summary.num_rows} rows, {summary.num_failed} failed; "
        f"{summary.num_prompt_tokens} prompt tokens, {summary.num_completion_tokens} completion tokens "
        f"in {progress.elapsed_s:.1f} s",
        file=sys.stderr,
    )
    if summary.num_failed:
        raise typer.Exit(EXIT_PARTLY_FAILED)
