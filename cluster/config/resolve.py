"""From settings to the final values of a group.

What depends on the checkpoint is read here, and what ties settings to each other is checked here.
"""

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.config import GroupConfig
from actors.model.checkpoint_files import CheckpointFiles
from actors.model.config import ModelConfig
from actors.model.tensors import layer_of, layer_prefix
from cluster.config.args import BUNDLED_CHECKPOINT, EngineArgs
from cluster.config.cores import threads_of_shard, usable_cores
from cluster.config.gpu_memory import gpu_budget
from cluster.config.serve_args import ServeArgs
from cluster.config.sizes import format_size
from kernels_integration.errors import CheckpointError, ConfigError
from kernels_integration.kv_layout import default_indexer_kv_dtype
from kernels_integration.topology import Topology

DEFAULT_SPECULATIVE_TOKENS = 3
DEFAULT_KV_CACHE_MEMORY_BYTES = 512 * 2**20
MOST_KV_OF_REQUESTS = 4
# Beyond any machine: what a real one lacks is told by doctor, and by the shard that cannot allocate it.
MAX_KV_CACHE_MEMORY_BYTES = 64 * 2**40


def resolve(args: EngineArgs) -> GroupConfig:
    """The group that the settings describe.

    Reads config.json and the names of the tensors, no weights.
    Errors: CheckpointError for the checkpoint, ConfigError for a setting: value, rule, legal values, fix.
    """
    path = _absolute(args.model)
    model = _read_model_config(args.model, path)
    topology = _topology(args)
    topology.check(num_heads=model.num_attention_heads)
    topology.check_block_size(args.block_size)
    num_speculative_tokens = _num_speculative_tokens(args, model, path)
    if args.max_num_batched_tokens <= num_speculative_tokens:
        raise ConfigError(
            f"max-num-batched-tokens {args.max_num_batched_tokens} is less than one request's rows, "
            f"num-speculative-tokens {num_speculative_tokens} + 1; use {num_speculative_tokens + 1} or more"
        )
    device = _device(args)
    dtype = "float32" if args.dtype == "auto" else args.dtype
    kv_cache_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    indexer_kv_dtype = _indexer_kv_dtype(args, model, kv_cache_dtype)
    bytes_per_block = args.block_size * model.kv_bytes_per_token(
        num_speculative_tokens, kv_cache_dtype, indexer_kv_dtype
    )
    num_kv_blocks = _num_kv_blocks(args, bytes_per_block)
    if device == "cuda" and args.num_kv_blocks is None and args.kv_cache_memory_bytes is None:
        budget = gpu_budget(args, model, dtype=dtype, num_speculative_tokens=num_speculative_tokens)
        # Beyond a few times what all requests can hold, blocks would only be counted.
        most = MOST_KV_OF_REQUESTS * args.max_num_seqs * (args.max_model_len or model.max_model_len)
        held = budget.require(bytes_per_block) // bytes_per_block
        num_kv_blocks = min(held, -(-most // args.block_size))
    derived: dict[str, Any] = {
        "model_path": str(path),
        "served_model_name": args.served_model_name or _default_name(args.model, path),
        "num_speculative_tokens": num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": _draft_table(args, num_speculative_tokens),
        "num_mtp_modules": max(model.num_drafting_layers(num_speculative_tokens), 1),
        "vocab_size": model.vocab_size,
        "max_model_len": _max_model_len(args, model, num_kv_blocks, bytes_per_block),
        "long_prefill_token_threshold": _long_prefill_token_threshold(args),
        "num_kv_blocks": num_kv_blocks,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "indexer_kv_dtype": indexer_kv_dtype,
        "device": device,
        "scheduling": _scheduling(args, device),
        "num_threads": _num_threads(args, device),
        # Where it is auto the shard chooses: whether a backend can be used shows there.
        "attention_backend": args.attention_backend,
        "chat_template": _chat_template(args),
        "heartbeat_timeout_s": args.heartbeat_timeout,
        "step_timeout_s": args.step_timeout,
        "placement_timeout_s": args.placement_timeout,
        "recovery_timeout_s": args.recovery_timeout,
        "trace": args.trace is not None,
        "log_dir": None if args.log_dir is None else os.path.abspath(args.log_dir),
    }
    same = {field.name for field in fields(GroupConfig)} & EngineArgs.model_fields.keys() - derived.keys()
    return GroupConfig(**derived, **{name: getattr(args, name) for name in same})


def count_mtp_modules(model: ModelConfig, names: Iterable[str]) -> int:
    """MTP modules, from the first on, of which any tensor is among `names`: converters often drop them."""
    found = {module for name in names if (module := _mtp_module(model, name)) is not None}
    return next(module for module in range(model.num_mtp_layers + 1) if module not in found)


def _mtp_module(model: ModelConfig, name: str) -> int | None:
    layer = layer_of(name)
    module = -1 if layer is None else layer - model.num_hidden_layers
    return module if 0 <= module < model.num_mtp_layers else None


def _absolute(given: str) -> Path:
    """Of a user that nobody knows, ~nouser/x, the path as it is given: there is no such file, either."""
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError:
        return Path(given).absolute()


def _read_model_config(given: str, path: Path) -> ModelConfig:
    if not path.is_dir():
        raise CheckpointError(
            f"no such model path: {given}; --model must be a directory that holds config.json, "
            "tokenizer.json and *.safetensors. Hub names are not downloaded: download the model first and "
            f"pass its directory, or leave --model out for the bundled {BUNDLED_CHECKPOINT.name}"
        )
    return ModelConfig.from_pretrained(path)


def _files_of(path: Path) -> CheckpointFiles:
    """What the headers say, which decide; the files are closed."""
    files = CheckpointFiles(path)
    files.close()
    return files


def _default_name(given: str, path: Path) -> str:
    return path.name if path == BUNDLED_CHECKPOINT else given


def _chat_template(args: EngineArgs) -> str | None:
    """The file's absolute path: actors run in directories of their own."""
    if args.chat_template is None:
        return None
    if args.tokenizer_mode == "deepseek_v32":
        raise ConfigError(
            f"chat-template {args.chat_template} and tokenizer-mode deepseek_v32 exclude each other: the "
            "encoding of DeepSeek-V3.2 uses no template; pass one of them"
        )
    file = _absolute(args.chat_template)
    if not file.is_file():
        raise ConfigError(
            f"chat-template {args.chat_template} is no file; it must be a file that holds a Jinja template"
        )
    return str(file)


def _device(args: EngineArgs) -> str:
    """cpu or cuda. torch is asked only where the system has a GPU's driver."""
    if args.device == "cpu":
        return "cpu"
    if args.device == "auto" and args.tensor_parallel_size > 1:
        return "cpu"
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            f"device cuda with tensor-parallel-size {args.tensor_parallel_size}: shards on several GPUs are "
            "not supported yet; use --tensor-parallel-size 1 or --device cpu"
        )
    if _finds_gpu():
        return "cuda"
    if args.device == "cuda":
        raise ConfigError(
            "device cuda: this machine's torch finds no GPU; use --device cpu, or install a driver and a "
            "torch built for it"
        )
    return "cpu"


def _scheduling(args: EngineArgs, device: str) -> str:
    """A GPU works on while the host looks at what it did; on a CPU there is no host beside it."""
    if args.scheduling != "auto":
        return args.scheduling
    return "deferred" if device == "cuda" else "sync"


def _num_threads(args: EngineArgs, device: str) -> int:
    """Of each shard. Two that wait for one core wait actively: a step becomes up to 80 times as slow."""
    is_here = (args.address or os.environ.get("RAY_ADDRESS") or "local") == "local"
    if args.threads is None and (device != "cpu" or not is_here):
        return 1
    num_cores = usable_cores()
    num_shards = args.tensor_parallel_size * (args.num_groups if isinstance(args, ServeArgs) else 1)
    if args.threads is None:
        return threads_of_shard(num_cores, num_shards)
    if is_here and args.threads > 1 and args.threads * num_shards > num_cores:
        raise ConfigError(
            f"threads {args.threads} for each of {num_shards} shards are more than the {num_cores} cores of "
            "this machine, and would wait for each other; use auto, or 1 to "
            f"{threads_of_shard(num_cores, num_shards)}"
        )
    return args.threads


def _finds_gpu() -> bool:
    if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd")):
        return False
    import torch

    return torch.cuda.is_available()


def _topology(args: EngineArgs) -> Topology:
    return Topology(
        tp=args.tensor_parallel_size,
        dcp=args.decode_context_parallel_size,
        interleave=args.cp_kv_cache_interleave_size,
        expert_parallel=args.enable_expert_parallel,
    )


def _indexer_kv_dtype(args: EngineArgs, model: ModelConfig, kv_cache_dtype: str) -> str:
    if args.indexer_kv_dtype == "auto":
        return default_indexer_kv_dtype(kv_cache_dtype)
    if not model.has_indexer:
        raise ConfigError(
            f"indexer-kv-dtype is {args.indexer_kv_dtype}, but {args.model} has no indexer; use auto"
        )
    return args.indexer_kv_dtype


def _num_speculative_tokens(args: EngineArgs, model: ModelConfig, path: Path) -> int:
    reads_files = model.num_mtp_layers and args.load_format != "dummy"
    files = _files_of(path) if reads_files else None
    count = model.num_mtp_layers if files is None else count_mtp_modules(model, files.tensors)
    lacking = None if files is None else files.missing_file_of(layer_prefix(model.num_hidden_layers + count))
    if lacking is not None and args.num_speculative_tokens != 0:
        raise CheckpointError(lacking)
    if args.num_speculative_tokens is None:
        return default_speculative_tokens(model, count)
    needed = model.num_drafting_layers(args.num_speculative_tokens)
    if args.num_speculative_tokens > 0 and (not needed or count < needed):
        raise ConfigError(
            f"num-speculative-tokens is {args.num_speculative_tokens}, but {args.model} has no MTP weights "
            f"(model.layers.{model.num_hidden_layers + count}.*); use {count}, or a checkpoint that keeps "
            "its MTP layers"
        )
    return args.num_speculative_tokens


def default_speculative_tokens(model: ModelConfig, num_mtp_modules: int) -> int:
    """Drafts where nothing is said, of a checkpoint that holds so many MTP modules: 0 if one lacks."""
    needed = model.num_drafting_layers(DEFAULT_SPECULATIVE_TOKENS)
    return DEFAULT_SPECULATIVE_TOKENS if 0 < needed <= num_mtp_modules else 0


def _long_prefill_token_threshold(args: EngineArgs) -> int:
    if args.long_prefill_token_threshold is None:
        return max(args.max_num_batched_tokens // 2, 1)
    return args.long_prefill_token_threshold


def _draft_table(args: EngineArgs, ceiling: int) -> tuple[tuple[int, int, int], ...]:
    table = args.num_speculative_tokens_per_batch_size or ()
    for first, last, k in table:
        if k > ceiling:
            raise ConfigError(
                f"num-speculative-tokens-per-batch-size gives {first} to {last} requests {k} drafts; "
                f"num-speculative-tokens allows {ceiling}; lower the row, or raise num-speculative-tokens"
            )
    return table


def _num_kv_blocks(args: EngineArgs, bytes_per_block: int) -> int:
    if args.num_kv_blocks is not None and args.kv_cache_memory_bytes is not None:
        raise ConfigError(
            f"num-kv-blocks {args.num_kv_blocks} and kv-cache-memory-bytes {args.kv_cache_memory_bytes} both "
            "size the KV cache; pass one of them"
        )
    limit = format_size(MAX_KV_CACHE_MEMORY_BYTES)
    if args.num_kv_blocks is not None:
        most = MAX_KV_CACHE_MEMORY_BYTES // bytes_per_block
        if args.num_kv_blocks > most:
            raise ConfigError(
                f"num-kv-blocks {args.num_kv_blocks} of {bytes_per_block} bytes make a KV cache of more than "
                f"{limit} a shard; use 1 to {most}"
            )
        return args.num_kv_blocks
    budget = args.kv_cache_memory_bytes or DEFAULT_KV_CACHE_MEMORY_BYTES
    if budget > MAX_KV_CACHE_MEMORY_BYTES:
        raise ConfigError(
            f"kv-cache-memory-bytes {format_size(budget)} is more than {limit} a shard; "
            f"use {format_size(bytes_per_block)} to {limit}"
        )
    if budget < bytes_per_block:
        raise ConfigError(
            f"kv-cache-memory-bytes {format_size(budget)} does not hold one block of block-size "
            f"{args.block_size}; use at least {format_size(bytes_per_block)} ({bytes_per_block} bytes)"
        )
    return budget // bytes_per_block


def _max_model_len(args: EngineArgs, model: ModelConfig, num_kv_blocks: int, bytes_per_block: int) -> int:
    """The last token of a sequence has no KV, so a cache of n tokens serves sequences of n + 1."""
    tokens_per_block = _topology(args).tokens_per_block(args.block_size)
    held = num_kv_blocks * tokens_per_block + 1
    if args.max_model_len is None:
        return min(model.max_model_len, held)
    if args.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max-model-len {args.max_model_len} is beyond the checkpoint's max_position_embeddings "
            f"{model.max_model_len}; use at most {model.max_model_len}"
        )
    if args.max_model_len > held:
        blocks = -(-(args.max_model_len - 1) // tokens_per_block)
        raise ConfigError(
            f"max-model-len {args.max_model_len} is beyond what the KV cache holds, {held} tokens in "
            f"{num_kv_blocks} blocks; use at most {held}, or --num-kv-blocks {blocks}, or "
            f"--kv-cache-memory-bytes {blocks * bytes_per_block}"
        )
    return args.max_model_len
