"""Put a shard together: checkpoint slice, KV cache, state."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from actors.config import GroupConfig
from actors.model.config import ModelConfig
from actors.model.load_progress import LoadProgress
from actors.model.model import Model, load_model
from actors.shard.device_shard import DeviceShard
from actors.shard.one_arithmetic import require_one_arithmetic
from actors.shard.samplers import draws_by_rejection
from actors.shard.shard import Shard
from kernels_integration import registry
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import ConfigError
from kernels_integration.kv_cache import KVCache
from kernels_integration.profiled import profiled
from kernels_integration.spans import SpannedCollectives, Spans

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_shard(
    config: GroupConfig,
    *,
    tp: Collectives,
    dcp_comm: Collectives,
    spans: Spans | None = None,
    progress: LoadProgress | None = None,
    fixed_shapes: bool | None = None,
    prepares_grammars: bool = False,
) -> Shard | DeviceShard:
    """Load this rank's slice of the checkpoint and allocate its KV cache.

    tp: all ranks of the group; dcp_comm: the ranks of this rank's DCP group (consecutive TP ranks).
    spans: where the rank's time is recorded, if config.trace. progress: told of the bytes of the weights.
    fixed_shapes: steps whose shapes the host knows (`DeviceShard`, coupled acceptance only); None: where
    the backend computes on a device of its own. prepares_grammars: soon, so that no request waits for it.
    Errors: CheckpointError naming every tensor that does not fit; ConfigError for a KV cache, or a state of
    requests, that memory does not hold.
    """
    spans = spans or Spans(is_on=config.trace)
    if config.trace:
        tp, dcp_comm = SpannedCollectives(tp, spans), SpannedCollectives(dcp_comm, spans)
    dcp = DcpGroup(config.cp_kv_cache_interleave_size, dcp_comm, config.dcp_comm_backend)
    model = load_weights(config, tp=tp, dcp=dcp, spans=spans, progress=progress)
    taken = [_allocated(model)]
    cache = allocate_cache(config, model)
    taken.append(_allocated(model))
    shard = assemble(config, model, cache, tp=tp, dcp=dcp, spans=spans, fixed_shapes=fixed_shapes)
    taken.append(_allocated(model))
    if prepares_grammars:
        shard.compiler.prepare_soon()
    if model.backend.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        names = ("weights", "KV cache", "state")
        parts = zip(names, np.diff([0, *taken]) / 2**30, strict=True)
        logger.info(
            "memory of the GPU: %s; %.1f GiB of %.1f are free for steps and graphs",
            ", ".join(f"{name} {size:.1f} GiB" for name, size in parts),
            free / 2**30,
            total / 2**30,
        )
    return shard


def _allocated(model: Model) -> int:
    return torch.cuda.memory_allocated() if model.backend.device.type == "cuda" else 0


def load_weights(
    config: GroupConfig, *, tp: Collectives, dcp: DcpGroup, spans: Spans, progress: LoadProgress | None = None
) -> Model:
    """The rank's model on the backend that the group's settings lead to. Errors: as `build_shard`."""
    model_config = ModelConfig.from_pretrained(config.model_path)
    needs = backend_needs(config, model_config)
    choice = registry.choose(config.attention_backend, needs)
    for _, reason in choice.passed_over:
        logger.warning("%s; %s computes instead", reason, choice.name)
    backend = registry.create(choice.name, needs, check_plans=config.check_plans)
    require_one_arithmetic(backend, tp)
    if config.profile:
        backend = profiled(backend, spans)
    return load_model(
        model_config,
        config.model_path,
        dtype=DTYPES[config.dtype],
        backend=backend,
        tp=tp,
        dcp=dcp,
        num_mtp_layers=model_config.num_drafting_layers(config.num_speculative_tokens),
        expert_parallel=config.enable_expert_parallel,
        spans=spans,
        progress=progress,
        load_format=config.load_format,
    )


def allocate_cache(config: GroupConfig, model: Model) -> KVCache:
    """The rank's KV cache, for all layers of the model. Errors: ConfigError where memory does not hold it."""
    num_layers = model.config.num_hidden_layers + len(model.mtp_layers)
    layout = model.config.kv_layout(config.kv_cache_dtype, config.indexer_kv_dtype)
    index_layers = model.config.index_layers(num_layers)
    num_slots = config.num_kv_blocks * config.block_size
    num_bytes = num_slots * layout.bytes_per_token(num_layers, len(index_layers))
    with _refusing(
        f"the KV cache of a shard needs {num_bytes / 2**30:.1f} GiB ({num_bytes} bytes)",
        "--kv-cache-memory-bytes or --num-kv-blocks",
    ):
        return KVCache.allocate(
            layout, num_layers, num_slots, device=model.backend.device, index_layers=index_layers
        )


def assemble(
    config: GroupConfig,
    model: Model,
    cache: KVCache,
    *,
    tp: Collectives,
    dcp: DcpGroup,
    spans: Spans,
    fixed_shapes: bool | None = None,
) -> Shard | DeviceShard:
    """A shard over a model and a cache; arguments and errors as for `build_shard`."""
    with _refusing(
        f"max-num-seqs {config.max_num_seqs} requests of max-model-len {config.max_model_len} need state",
        "--max-num-seqs or --max-model-len",
    ):
        if fixed_shapes is None:
            fixed_shapes = model.backend.device.type != "cpu" and not draws_by_rejection(config)
        kind = DeviceShard if fixed_shapes else Shard
        return kind(config, model, cache, tp=tp, dcp=dcp, spans=spans)


def backend_needs(config: GroupConfig, model: ModelConfig) -> registry.Needs:
    """What a shard of the group asks of its backend."""
    layout = model.kv_layout(config.kv_cache_dtype, config.indexer_kv_dtype)
    return registry.Needs(
        device=config.device,
        dtype=config.dtype,
        kv_cache_dtype=layout.kv_cache_dtype,
        indexer_kv_dtype=layout.indexer_kv_dtype,
        num_heads=config.topology.attended_heads(model.num_attention_heads),
        latent_rank=layout.latent_rank,
        rope_dim=layout.rope_dim,
        index_dim=layout.index_dim,
        needs_lse=config.topology.dcp > 1,
        deterministic=config.deterministic,
    )


@contextmanager
def _refusing(needed: str, flags: str) -> Iterator[None]:
    """A failed allocation is the settings' fault: NumPy raises MemoryError, torch a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not ("alloc" in text or "out of memory" in text):
            raise
        raise ConfigError(
            f"{needed}, which the machine's memory does not hold; use a smaller {flags} ({text.strip()})"
        ) from error
