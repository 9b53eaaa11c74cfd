"""What a checkpoint directory holds, what it takes to serve it, and what keeps it from being served.

Read are config.json, the tokenizer and the headers of the weights; values only if asked for.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.known_fields import unknown_fields
from actors.model.load_progress import LoadProgress
from actors.model.model import measure_shard
from actors.model.model_folder import ModelFolder
from actors.model.quantization import DEFAULT_BLOCK_SIZE
from actors.model.safetensors_file import TensorInfo
from actors.model.tensors import (
    main_tensor_shapes,
    mtp_tensor_shapes,
    parameter_counts,
    repeated_tensor_shapes,
    repeated_tensors,
)
from actors.model.weights import WeightReader
from cluster.config.resolve import count_mtp_modules, default_speculative_tokens
from cluster.config.sizes import format_size
from cluster.frontend.front_end import ModelFrontend
from cluster.report.load_report import describe_load
from cluster.tokenizer import load_tokenizer
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError, LatentrayError, shortened
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.topology import Topology

BLOCK_SIZE = 16
"""Tokens of a KV block, as EngineArgs has it by default: the cache holds whole blocks."""
_MAX_MEASURED_PROBLEMS = 1000
"""Beyond it the model that is built to be measured is not the one in the files, and may be any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """From config.json."""

    model_type: str
    num_parameters: int
    """Of the main model."""
    num_active_parameters: int
    """Of these, what one token meets."""
    num_mtp_parameters: int
    num_layers: int
    num_dense_layers: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    indexer_layout: str | None
    """A letter for each layer: F selects for itself, S shares the last selection. None without an indexer."""
    index_topk: int
    num_mtp_modules: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """From the headers."""

    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]
    """Bytes of each dtype."""
    has_stacked_experts: bool
    num_mtp_modules: int
    """Whose weights are there, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the last of the shards takes; the others take the same or, by uneven shares, less."""

    tensor_parallel_size: int
    decode_context_parallel_size: int
    enable_expert_parallel: bool
    dtype: str
    kv_cache_dtype: str
    indexer_kv_dtype: str | None
    """None without an indexer."""
    file_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int | None
    """Given: for weights and KV cache of each shard."""
    num_tokens: int | None
    """That fit in it, on all shards together."""


@dataclass(slots=True, kw_only=True)
class Inspection:
    path: str
    model: ModelFacts | None = None
    files: FileFacts | None = None
    shard: ShardFacts | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect_checkpoint(
    path: str | Path,
    *,
    tensor_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    dtype: str = "float32",
    kv_cache_dtype: str | None = None,
    indexer_kv_dtype: str | None = None,
    memory_bytes: int | None = None,
    check_values: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Inspection:
    """All that can be told of a directory; what is wrong is in `problems` and never raised.

    dtype: of the computation; kv_cache_dtype: None is the same; indexer_kv_dtype: None is what goes with it.
    memory_bytes: of one shard.
    check_values: read all weights and look for NaN, infinity and copies that differ.
    """
    path = Path(path)
    found = Inspection(path=str(path))
    config = _read_config(path, found)
    if config is not None:
        unknown = unknown_fields(ModelFolder(path).read_object("config.json") or {})
        if unknown:
            found.notes.append(
                f"config.json has fields that are not known and not used: {shortened(', '.join(unknown))}"
            )
    _check_tokenizer(path, config, found)
    if not path.is_dir():
        return found
    with Checkpoint(path, config.weight_block_size if config else DEFAULT_BLOCK_SIZE) as checkpoint:
        num_mtp_modules = count_mtp_modules(config, checkpoint) if config else 0
        found.files = _file_facts(checkpoint, num_mtp_modules)
        found.notes += checkpoint.notes
        if config is None:
            found.problems += checkpoint.problems
            return found
        found.model = _model_facts(config)
        if num_mtp_modules < config.num_mtp_layers:
            drafts = "" if default_speculative_tokens(config, num_mtp_modules) else ": served without drafts"
            found.notes.append(
                f"config.json announces {config.num_mtp_layers} MTP modules, the weights hold "
                f"{num_mtp_modules}{drafts}"
            )
        num_mtp_modules = config.num_drafting_layers(default_speculative_tokens(config, num_mtp_modules))
        required = main_tensor_shapes(config) | mtp_tensor_shapes(config, num_mtp_modules)
        optional = repeated_tensor_shapes(config) | mtp_tensor_shapes(config)
        tensor_problems = checkpoint.find_problems(required, optional)
        found.problems += tensor_problems
        try:
            Topology(tp=tensor_parallel_size, dcp=decode_context_parallel_size).check(
                num_heads=config.num_attention_heads
            )
        except LatentrayError as error:
            found.problems.append(str(error))
        else:
            if len(tensor_problems) > _MAX_MEASURED_PROBLEMS:
                found.notes.append("config.json describes another model than the weights: sizes are left out")
                return found
            found.shard = _shard_facts(
                config,
                checkpoint.tensors,
                tp_size=tensor_parallel_size,
                dcp_size=decode_context_parallel_size,
                expert_parallel=enable_expert_parallel,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype or dtype,
                indexer_kv_dtype=indexer_kv_dtype,
                num_mtp_modules=num_mtp_modules,
                memory_bytes=memory_bytes,
            )
            _check_memory(found.shard, found.problems)
        if check_values and not tensor_problems:
            found.problems += _check_values(config, checkpoint, num_mtp_modules, progress)
    return found


def _read_config(path: Path, found: Inspection) -> ModelConfig | None:
    try:
        return ModelConfig.from_pretrained(path)
    except CheckpointError as error:
        first, *lines = str(error).splitlines()
        found.problems += [f"config.json: {line.strip()}" for line in lines] or [first]
        return None


def _check_tokenizer(path: Path, config: ModelConfig | None, found: Inspection) -> None:
    """With what a server builds from the directory: tokenizer, templates, generation_config.json."""
    if not path.is_dir():
        return
    try:
        if config is None:
            load_tokenizer(path)
        else:
            ModelFrontend.from_pretrained(path, served_model_name=path.name, max_model_len=1)
    except LatentrayError as error:
        if str(error) not in found.problems:  # config.json is read for the tokenizer too
            found.problems.append(str(error))


def _model_facts(config: ModelConfig) -> ModelFacts:
    counts = parameter_counts(config)
    layers = range(config.num_hidden_layers)
    letters = "".join("F" if config.runs_indexer(layer) else "S" for layer in layers)
    return ModelFacts(
        model_type=config.model_type,
        num_parameters=counts.main,
        num_active_parameters=counts.active,
        num_mtp_parameters=counts.mtp,
        num_layers=config.num_hidden_layers,
        num_dense_layers=sum(not config.is_moe_layer(layer) for layer in layers),
        num_experts=config.n_routed_experts,
        num_experts_per_token=config.num_experts_per_tok,
        num_shared_experts=config.n_shared_experts,
        indexer_layout=letters if config.has_indexer else None,
        index_topk=config.index_topk,
        num_mtp_modules=config.num_mtp_layers,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
    )


def _file_facts(checkpoint: Checkpoint, num_mtp_modules: int) -> FileFacts:
    dtypes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.num_bytes
    return FileFacts(
        num_files=len({info.file for info in checkpoint.tensors.values()}),
        num_bytes=sum(dtypes.values()),
        dtypes=dict(sorted(dtypes.items(), key=lambda item: -item[1])),
        has_stacked_experts=any(info.stored_as for info in checkpoint.tensors.values()),
        num_mtp_modules=num_mtp_modules,
    )


def _shard_facts(
    config: ModelConfig,
    stored: Mapping[str, TensorInfo],
    *,
    tp_size: int,
    dcp_size: int,
    expert_parallel: bool,
    dtype: str,
    kv_cache_dtype: str,
    indexer_kv_dtype: str | None,
    num_mtp_modules: int,
    memory_bytes: int | None,
) -> ShardFacts:
    size = measure_shard(
        config,
        stored,
        dtype=getattr(torch, dtype),
        backend=TorchBackend(getattr(torch, dtype)),
        tp=InProcessCollectives.create(tp_size)[-1],
        dcp=DcpGroup(1, InProcessCollectives.create(dcp_size)[0]),
        num_mtp_layers=num_mtp_modules,
        expert_parallel=expert_parallel,
    )
    per_token = config.kv_bytes_per_token(num_mtp_modules, kv_cache_dtype, indexer_kv_dtype)
    key_dtype = config.kv_layout(kv_cache_dtype, indexer_kv_dtype).indexer_kv_dtype
    num_tokens = None
    if memory_bytes is not None:
        num_blocks = max(memory_bytes - size.weight_bytes, 0) // (per_token * BLOCK_SIZE)
        num_tokens = num_blocks * Topology(tp=tp_size, dcp=dcp_size).tokens_per_block(BLOCK_SIZE)
    return ShardFacts(
        tensor_parallel_size=tp_size,
        decode_context_parallel_size=dcp_size,
        enable_expert_parallel=expert_parallel,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        indexer_kv_dtype=key_dtype if config.has_indexer else None,
        file_bytes=size.file_bytes,
        weight_bytes=size.weight_bytes,
        kv_bytes_per_token=per_token,
        memory_bytes=memory_bytes,
        num_tokens=num_tokens,
    )


def _check_memory(shard: ShardFacts, problems: list[str]) -> None:
    if shard.memory_bytes is not None and not shard.num_tokens:
        problems.append(
            f"memory {format_size(shard.memory_bytes)} does not hold a shard's weights, "
            f"{format_size(shard.weight_bytes)}, and a block of KV cache; use more, more shards "
            "(--tensor-parallel-size) or a smaller --dtype"
        )


def _check_values(
    config: ModelConfig, checkpoint: Checkpoint, num_mtp_modules: int, progress: Callable[[str], None]
) -> list[str]:
    """Read every tensor that is there, file by file."""
    problems = []
    read, start_s = LoadProgress(), time.monotonic()
    read.begin(sum(info.num_bytes for info in checkpoint.tensors.values()))
    by_place = sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    for name, info in by_place:
        elapsed_s = time.monotonic() - start_s
        progress(f"checking values: {describe_load([read.state()])} ({elapsed_s:.0f} s)")
        problem = checkpoint.find_bad_values(name)
        if problem is not None:
            problems.append(problem)
        read.advance(info.num_bytes)
    reader = WeightReader(checkpoint=checkpoint, dtype=torch.float32, topology=Topology(), rank=0)
    for copy, original in repeated_tensors(config, num_mtp_modules).items():
        if copy in checkpoint and not problems:
            try:
                reader.require_copy(copy, original)
            except CheckpointError as error:
                problems.append(str(error))
    return problems
