"""`latentray batch`: files of OpenAI batch rows in, one of answers out."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.config import EngineArgs, Settings
from cluster.config.resolve import resolve
from cluster.errors import EXIT_PARTLY_FAILED
from kernels_integration.errors import ConfigError

if TYPE_CHECKING:
    from actors.config import GroupConfig
    from cluster.answering.engine import Engine
    from cluster.batch import BatchSummary
    from cluster.batch.inputs import BatchInput
    from cluster.batch.results import Results
    from cluster.batch.work import BatchWork
    from cluster.frontend.front_end import ModelFrontend
    from cluster.report.output_file import OutputFile


@with_settings(EngineArgs)
def batch(
    settings: Settings[EngineArgs],
    input_names: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Batch rows: JSONL (.gz, .zst) or .parquet; a file, a directory, a pattern in quotes, a URL "
            "of fsspec's; - is stdin.",
        ),
    ],
    output_names: Annotated[
        list[str],
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="JSONL of answers; gzip as .gz; a file, or a URL of fsspec's with --journal; - is stdout.",
        ),
    ],
    errors: Annotated[
        str | None,
        typer.Option(
            "--errors",
            metavar="FILE",
            help="The rows that failed, once more [default: OUTPUT with .errors before its .jsonl]",
            show_default=False,
        ),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            "--journal",
            metavar="FILE",
            help="What is done, for a later run of the same command to go on with [default: OUTPUT.journal]",
            show_default=False,
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Answer all rows anew, whatever earlier runs have done.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask once more for the rows that failed in earlier runs.")
    ] = False,
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
    """Answer files of OpenAI batch rows.

    Rows go to /v1/chat/completions, /v1/completions or /v1/responses. There is one answer for each row, in
    their order; a row that fails gets an error row, and the exit code is 3. Until all rows are answered the
    output does not change, and the same command goes on where an earlier run has ended, however it did.
    """
    from cluster.answering.engine import check_executor
    from cluster.batch.inputs import BatchInput
    from cluster.batch.plan import StreamPlan, plan_output
    from cluster.batch.settings import answer_settings

    check_executor(executor)
    input_name = _only("--input", input_names, "pass a directory or a pattern such as 'rows/*.jsonl'")
    output_name = _only("--output", output_names, "copy the file afterwards")
    config = resolve(settings.args)
    # Files first: a wrong path should not cost the start of an engine.
    plan = plan_output(output_name, errors=errors, journal=journal)
    source = BatchInput(input_name)
    with closing(_Run(config, settings.args, source, executor, max_in_flight)) as run:
        if isinstance(plan, StreamPlan):
            with plan.open(source) as (results, output):
                num_failed = run.stream(results, output)
        else:
            if restart:
                run.start()  # if that fails, what earlier runs have done is still there
            with plan.open(source, settings=answer_settings(config), restart=restart) as work:
                num_failed = run.go_on(work, retry_failed=retry_failed)
    if num_failed and not allow_failed_rows:
        raise typer.Exit(EXIT_PARTLY_FAILED)


class _Run:
    """One run of the command: an engine for the rows that need one."""

    def __init__(
        self,
        config: "GroupConfig",
        args: EngineArgs,
        source: "BatchInput",
        executor: str,
        max_in_flight: int | None,
    ) -> None:
        self._config = config
        self._args = args
        self._source = source
        self._executor = executor
        self._max_in_flight = max_in_flight or 2 * config.max_num_seqs
        self._num_rows = source.count()
        self._frontend: ModelFrontend | None = None
        self._engine: Engine | None = None
        self._start_up_s = 0.0

    def go_on(self, work: "BatchWork", *, retry_failed: bool) -> int:
        """Answer what earlier runs have not, and make the output. Returns the number of failed rows."""
        from cluster.batch.rows import know

        if work.is_whole and not self._source.is_once:
            whole = work.whole_already(know(row) for row in self._source.rows())
            if whole is not None and not (retry_failed and whole["failed"]):
                _tell(
                    f"nothing to do: {work.target.name} has the answers of all {whole['rows']} rows, "
                    f"{whole['failed']} failed"
                )
                return whole["failed"]
        num_left = work.begin(num_rows=self._num_rows, retry_failed=retry_failed)
        for note in work.notes:
            _tell(note)
        if num_left:
            _tell(f"going on: {num_left} rows are there from earlier runs (journal: {work.journal_path})")
        try:
            needs_engine = (
                not num_left
                or self._source.is_once
                or work.needs_answers(know(row) for row in self._source.rows())
            )
            num_failed = self.answer(work, needs_engine=needs_engine)
            work.finish()
        except BaseException:
            if work.num_done:
                _tell(
                    f"ended early: {work.num_done} rows are done; the same command goes on from there "
                    f"({work.rows_path} holds them)"
                )
            raise
        if work.num_changed:
            more = ", ..." if len(work.changed) < work.num_changed else ""
            _tell(
                f"{work.num_changed} rows ask for something else than before under the same custom_id, and "
                f"were answered anew: {', '.join(work.changed)}{more}"
            )
        if num_failed:
            _tell(f"failed rows: {num_failed}, also in {work.errors.name}")
        return num_failed

    def stream(self, results: "Results", output: "OutputFile") -> int:
        """Answer all rows into an output that no run can go on with. Returns the number of failed rows."""
        try:
            return self.answer(results)
        except BaseException:
            if output.num_lines:
                _tell(f"ended early: {output.num_lines} rows are in {output.where}")
            raise

    def start(self) -> "tuple[ModelFrontend, Engine]":
        """The engine; the first call starts it."""
        from cluster.answering.engine import start_engine
        from cluster.frontend.front_end import ModelFrontend

        if self._frontend is None or self._engine is None:
            self._frontend = ModelFrontend.of_group(self._config)
            with closing(ProgressLine()) as progress:
                self._engine = start_engine(
                    self._config,
                    executor=self._executor,
                    tokenizer=self._frontend.tokenizer.backend,
                    address=self._args.address,
                    trace_file=self._args.trace,
                    progress=progress,
                )
            self._start_up_s = progress.elapsed_s
        return self._frontend, self._engine

    def close(self) -> None:
        """End the engine, if one was started."""
        if self._engine is not None:
            self._engine.close()

    def answer(self, results: "Results", *, needs_engine: bool = True) -> int:
        """Returns the number of failed rows. needs_engine: False: earlier runs have answered all of them."""
        from cluster.batch import run_batch
        from cluster.frontend.front_end import ModelFrontend
        from cluster.report.progress import progress_bar

        engine: Engine | None = None
        if needs_engine:
            frontend, engine = self.start()
        else:
            frontend = ModelFrontend.of_group(self._config)
        start_s = time.monotonic()
        with progress_bar("Rows", self._num_rows, in_logs=True) as bar:
            summary = run_batch(
                self._source.rows(),
                results,
                engine=engine,
                frontend=frontend,
                max_in_flight=self._max_in_flight,
                seed=self._config.seed,
                on_row=lambda was_asked: bar.advance(timed=was_asked),
            )
            elapsed_s = time.monotonic() - start_s
        _tell_summary(summary, elapsed_s=elapsed_s, start_up_s=self._start_up_s)
        return summary.num_failed


def _tell_summary(summary: "BatchSummary", *, elapsed_s: float, start_up_s: float) -> None:
    _tell(
        f"{summary.num_rows} rows, {summary.num_failed} failed; "
        f"{summary.num_prompt_tokens} prompt tokens, {summary.num_completion_tokens} completion tokens "
        f"in {elapsed_s:.1f} s ({summary.num_completion_tokens / elapsed_s:.1f} completion tokens/s), "
        f"after {start_up_s:.1f} s of start-up"
    )


def _only(flag: str, values: Sequence[str], fix: str) -> str:
    if len(values) != 1:
        raise ConfigError(f"{flag} is given {len(values)} times ({', '.join(values)}); pass one; {fix}")
    return values[0]


def _tell(message: str) -> None:
    print(f"latentray: {message}", file=sys.stderr, flush=True)
