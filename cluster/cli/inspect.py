"""`latentray inspect`: what a checkpoint is, and what keeps it from being served."""

import dataclasses
import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.cli.progress_line import ProgressLine
from cluster.cli.tables import print_table
from cluster.config.args import IndexerKVDtype, KVCacheDtype
from cluster.config.sizes import format_size, parse_size
from cluster.errors import EXIT_USAGE
from kernels_integration.errors import ConfigError

if TYPE_CHECKING:
    from cluster.report.inspection import Inspection

_DTYPES = Literal["auto", "float32", "float64", "bfloat16"]


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Directory of the checkpoint.")],
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", metavar="N", min=1, help="Shards of the group.")
    ] = 1,
    decode_context_parallel_size: Annotated[
        int,
        typer.Option(
            "--decode-context-parallel-size",
            "-dcp",
            metavar="N",
            min=1,
            help="Shards that divide a sequence's KV cache between them.",
        ),
    ] = 1,
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel",
            help="Whole routed experts on each shard, instead of a part of each expert.",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory of each shard, for weights and KV cache, such as 80G."
        ),
    ] = None,
    dtype: Annotated[
        _DTYPES, typer.Option("--dtype", help="Computation. auto is float32 on a CPU.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        KVCacheDtype, typer.Option("--kv-cache-dtype", help="Storage of the latent KV. auto is --dtype.")
    ] = "auto",
    indexer_kv_dtype: Annotated[
        IndexerKVDtype,
        typer.Option(
            "--indexer-kv-dtype",
            help="Storage of the indexer keys. auto is fp8 with fp8_ds_mla, else the latent KV's.",
        ),
    ] = "auto",
    check_values: Annotated[
        bool, typer.Option("--check-values", help="Read all weights and look for NaN and infinity.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what a checkpoint holds and takes, from its headers.

    Exit code 2 when it cannot be served: every reason is listed.
    """
    memory_bytes = None
    if memory is not None:
        try:
            memory_bytes = parse_size(memory)
        except ValueError:
            raise ConfigError(
                f"--memory is {memory!r}; it must be a size of at least one byte, such as 512M or 80G"
            ) from None

    from cluster.report.inspection import inspect_checkpoint  # imports torch

    with closing(ProgressLine()) as progress:
        found = inspect_checkpoint(
            path,
            tensor_parallel_size=tensor_parallel_size,
            decode_context_parallel_size=decode_context_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            dtype="float32" if dtype == "auto" else dtype,
            kv_cache_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
            indexer_kv_dtype=None if indexer_kv_dtype == "auto" else indexer_kv_dtype,
            memory_bytes=memory_bytes,
            check_values=check_values,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(EXIT_USAGE)


def _print(found: "Inspection") -> None:
    for title, rows in (
        ("model", _model_rows(found)),
        ("files", _file_rows(found)),
        ("each shard", _shard_rows(found)),
    ):
        if rows:
            print_table((title, ""), rows)
            typer.echo()
    for note in found.notes:
        typer.echo(f"note: {note}")
    if found.problems:
        count = len(found.problems)
        typer.echo(f"cannot be served, {count} problem{'s' if count > 1 else ''}:")
        for problem in found.problems:
            typer.echo(f"  {problem}")
    else:
        typer.echo("can be served")


def _model_rows(found: "Inspection") -> list[tuple[str, str]]:
    model = found.model
    if model is None:
        return []
    experts = f"{model.num_experts}, {model.num_experts_per_token} for each token"
    if model.num_shared_experts:
        experts += f", and {model.num_shared_experts} shared"
    layout = model.indexer_layout
    if layout is None:
        indexer = "none: dense attention"
    elif "S" not in layout:
        indexer = f"in every layer; the best {model.index_topk} tokens"
    else:
        count = layout.count("F")
        indexer = f"in {count} of {len(layout)} layers, {layout}; the best {model.index_topk} tokens"
    return [
        ("family", model.model_type),
        ("parameters", f"{_billions(model.num_parameters)}, MTP {_billions(model.num_mtp_parameters)} more"),
        ("active parameters", f"{_billions(model.num_active_parameters)} for each token"),
        ("layers", f"{model.num_layers}, {model.num_dense_layers} of them dense"),
        ("experts", experts),
        ("indexer", indexer),
        ("MTP modules", str(model.num_mtp_modules)),
        ("context", f"{model.max_model_len} tokens"),
        ("vocabulary", str(model.vocab_size)),
    ]


def _file_rows(found: "Inspection") -> list[tuple[str, str]]:
    files = found.files
    if files is None:
        return []
    dtypes = ", ".join(f"{dtype} {format_size(size)}" for dtype, size in files.dtypes.items())
    return [
        ("weights", f"{format_size(files.num_bytes)} in {files.num_files} files"),
        ("dtypes", dtypes or "none"),
        ("experts", "stacked" if files.has_stacked_experts else "one by one"),
        ("MTP modules", str(files.num_mtp_modules)),
    ]


def _shard_rows(found: "Inspection") -> list[tuple[str, str]]:
    shard = found.shard
    if shard is None:
        return []
    rows = [
        ("tp, dcp", f"{shard.tensor_parallel_size}, {shard.decode_context_parallel_size}"),
        ("routed experts", "whole" if shard.enable_expert_parallel else "a part of each"),
        ("read from files", format_size(shard.file_bytes)),
        ("weights", f"{format_size(shard.weight_bytes)} in {shard.dtype}"),
        ("KV cache", f"{shard.kv_bytes_per_token} bytes per token in {shard.kv_cache_dtype}"),
        ("indexer keys", shard.indexer_kv_dtype or "none"),
    ]
    if shard.memory_bytes is not None:
        rows.append(("tokens", f"{shard.num_tokens} fit in {format_size(shard.memory_bytes)} per shard"))
    return rows


def _billions(count: int) -> str:
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
