"""What `latentray inspect` found, as tables for people."""

from typing import TYPE_CHECKING

import typer

from cluster.cli.tables import print_table
from cluster.config.sizes import format_size

if TYPE_CHECKING:
    from cluster.report.inspection import Inspection


def print_inspection(found: "Inspection") -> None:
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
