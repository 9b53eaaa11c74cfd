"""`latentray inspect`: what a checkpoint is, and what keeps it from being served."""

import dataclasses
import json
from contextlib import closing
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.inspection_tables import print_inspection
from cluster.cli.progress_line import ProgressLine
from cluster.config import EngineArgs, Settings
from cluster.config.sizes import parse_size
from cluster.errors import EXIT_USAGE
from kernels_integration.errors import ConfigError, shown

_LOOKED_AT = (
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "kv_cache_dtype",
    "indexer_kv_dtype",
)


@with_settings(EngineArgs, only=_LOOKED_AT)
def inspect(
    settings: Settings[EngineArgs],
    path: Annotated[str, typer.Argument(metavar="PATH", help="Directory of the checkpoint.")],
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory of each shard, for weights and KV cache, such as 80G."
        ),
    ] = None,
    check_values: Annotated[
        bool, typer.Option("--check-values", help="Read all weights and look for NaN and infinity.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a checkpoint holds and takes, from its headers.

    Exit code 2 when it cannot be served: every reason is listed.
    """
    memory_bytes = None if memory is None else _bytes_of(memory)
    args = settings.args

    from cluster.report.inspection import inspect_checkpoint  # imports torch

    with closing(ProgressLine()) as progress:
        found = inspect_checkpoint(
            path,
            tensor_parallel_size=args.tensor_parallel_size,
            decode_context_parallel_size=args.decode_context_parallel_size,
            enable_expert_parallel=args.enable_expert_parallel,
            dtype="float32" if args.dtype == "auto" else args.dtype,
            kv_cache_dtype=None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
            indexer_kv_dtype=None if args.indexer_kv_dtype == "auto" else args.indexer_kv_dtype,
            memory_bytes=memory_bytes,
            check_values=check_values,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print_inspection(found)
    if found.problems:
        raise typer.Exit(EXIT_USAGE)


def _bytes_of(memory: str) -> int:
    try:
        return parse_size(memory)
    except ValueError:
        raise ConfigError(
            f"--memory is {shown(memory)}; it must be a size of at least one byte, such as 512M or 80G"
        ) from None
