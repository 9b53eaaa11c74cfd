"""Which files a batch writes, decided before any is touched."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.batch.inputs import BatchInput
from cluster.batch.results import StreamedResults
from cluster.batch.target import LocalTarget, Target, UrlTarget, is_url
from cluster.batch.work import BatchWork, open_work, rows_path_of
from cluster.report.output_file import OutputFile, open_output, replaced_file
from kernels_integration.errors import ConfigError

_NOT_WRITTEN = (".zst", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """A descriptor, a device or a fifo: rows go into it in the order of the input, and no run can go on.

    errors: gets failed rows, too.
    """

    output: str
    errors: str | None

    @contextmanager
    def open(self, source: BatchInput) -> Iterator[tuple[StreamedResults, OutputFile]]:
        """Errors: ConfigError."""
        with ExitStack() as stack:
            output = stack.enter_context(open_output(self.output, input_path=source.paths[0]))
            write_failed: Callable[[bytes], None] = lambda line: None  # noqa: E731
            if self.errors is not None:
                write_failed = stack.enter_context(open_output(self.errors, flag="--errors")).write_line
            results = StreamedResults(output.write_line, write_failed)
            stack.callback(results.close)
            yield results, output


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """A file or a URL that appears when all rows are there, and the journal by which a later run goes on."""

    target: Target
    errors: Target
    journal: Path
    local: tuple[Path, ...]
    """All files that are written on this machine."""

    @contextmanager
    def open(self, source: BatchInput, *, settings: dict[str, Any], restart: bool) -> Iterator[BatchWork]:
        """Errors: ConfigError."""
        source.refuse_output(self.local)
        with open_work(self.journal, self.target, self.errors, settings=settings, restart=restart) as work:
            yield work


def plan_output(output: str, *, errors: str | None, journal: str | None) -> StreamPlan | FilePlan:
    """errors: None: beside the output. journal: None: beside the output.

    Errors: ConfigError: names that do not go together, or that cannot be written.
    """
    for flag, name in (("--output", output), ("--errors", errors or "")):
        if name.endswith(_NOT_WRITTEN):
            raise ConfigError(f"{flag} {name} would hold plain JSONL; pass a name in .jsonl or .jsonl.gz")
    path = None if is_url(output) else replaced_file(output)
    if path is None and not is_url(output):
        if journal is not None:
            raise ConfigError(
                f"--journal {journal} is of no use: --output {output} is a stream, with which no later run "
                "can go on; leave it out, or pass a file"
            )
        return StreamPlan(output=output, errors=errors)
    if path is None and journal is None:
        raise ConfigError(
            f"--output {output} is written when all rows are there; pass --journal FILE, where a later run "
            "finds it too, to keep those that are done until then"
        )
    journal_path = _local(journal, "--journal") if journal else Path(f"{path}.journal")
    target = _target(output, path, journal_path, "--output")
    if errors is None:
        errors = beside(output)
        if not is_url(errors) and os.path.islink(errors):  # which the user has not named: it may be planted
            raise ConfigError(f"{errors}, where failed rows go, is a link; move it away, or pass --errors")
    errors_path = None if is_url(errors) else _local(errors, "--errors")
    local = [journal_path, rows_path_of(journal_path), *filter(None, (path, errors_path))]
    if len(set(local)) < len(local):
        raise ConfigError(f"--output {output}, --errors {errors} and the journal {journal_path} are one file")
    return FilePlan(
        target=target,
        errors=_target(errors, errors_path, journal_path, "--errors"),
        journal=journal_path,
        local=tuple(local),
    )


def beside(output: str) -> str:
    """The name of the errors file: answers.jsonl.gz has answers.errors.jsonl.gz."""
    for suffix in (".jsonl", ".jsonl.gz", ".gz"):
        if output.endswith(suffix):
            return output.removesuffix(suffix) + ".errors" + suffix
    return output + ".errors"


def _local(name: str, flag: str) -> Path:
    path = replaced_file(name, flag=flag)
    if path is None:
        raise ConfigError(f"{flag} {name} is no regular file; pass another name")
    return path


def _target(name: str, path: Path | None, journal: Path, flag: str) -> Target:
    if path is not None:
        return LocalTarget(name, path, flag)
    return UrlTarget(name, journal.with_name(f"{journal.name}.{flag.strip('-')}.upload"), flag)
