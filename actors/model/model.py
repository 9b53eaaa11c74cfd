"""The forward pass of one rank: embedding, decoder layers, final norm, head; and the MTP layers.

T packed rows, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.decoder import DecoderLayer
from actors.model.dummy_weights import DummyWeights
from actors.model.load_progress import LoadProgress
from actors.model.mla import PassContext
from actors.model.mtp import MtpLayer
from actors.model.rotary import rotary_frequencies
from actors.model.safetensors_file import TensorInfo
from actors.model.slice_meter import ShardBytes, SliceMeter
from actors.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_prefix,
    main_tensor_shapes,
    mtp_tensor_shapes,
    repeated_tensor_shapes,
    repeated_tensors,
)
from actors.model.weights import WeightReader
from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError
from kernels_integration.kv_cache import KVCache
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.rows import Rows
from kernels_integration.spans import Spans
from kernels_integration.topology import Topology
from kernels_integration.weight import Weight, accumulate_dtype


def load_model(
    config: ModelConfig,
    path: str | Path,
    *,
    dtype: torch.dtype,
    backend: Backend,
    tp: Collectives,
    dcp: DcpGroup,
    num_mtp_layers: int,
    expert_parallel: bool = False,
    spans: Spans | None = None,
    progress: LoadProgress | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
) -> "Model":
    """Rank `tp.rank`'s part of the checkpoint at `path`; only that part is read.

    The DCP group is `dcp.size` consecutive ranks of `tp`: dcp.rank == tp.rank % dcp.size.
    backend: what computes; the weights lie as it keeps them.
    num_mtp_layers: how many MTP layers to load, from the first.
    expert_parallel: whole routed experts on each rank, instead of a part of each.
    progress: told of the bytes to read and read, for other threads to look at.
    load_format: dummy: random weights, and of `path` only its name is used.

    Errors: ConfigError: sizes that cannot be split so. CheckpointError: tensors that are missing, unexpected,
    wrongly shaped or not finite, files that cannot be read.
    """
    topology = _topology(tp, dcp, expert_parallel)
    topology.check(num_heads=config.num_attention_heads)
    if num_mtp_layers > config.num_mtp_layers == 0:
        raise CheckpointError(
            f"{path} has no MTP layer (num_nextn_predict_layers 0) to draft with; use 0 speculative tokens"
        )
    assert num_mtp_layers <= config.num_mtp_layers
    progress = progress or LoadProgress()
    required = main_tensor_shapes(config) | mtp_tensor_shapes(config, num_mtp_layers)
    with ExitStack() as opened:
        source: Checkpoint | DummyWeights
        stored: Mapping[str, TensorInfo] = {}
        if load_format == "dummy":
            source = DummyWeights(required, config.weight_block_size)
        else:
            source = opened.enter_context(Checkpoint(path, config.weight_block_size))
            source.check(required, repeated_tensor_shapes(config) | mtp_tensor_shapes(config))
            stored = source.tensors
        size = measure_shard(
            config,
            stored,
            dtype=dtype,
            backend=backend,
            tp=tp,
            dcp=dcp,
            num_mtp_layers=num_mtp_layers,
            expert_parallel=expert_parallel,
        )
        progress.begin(size.file_bytes)
        source.on_read = progress.advance
        reader = WeightReader(
            checkpoint=source, dtype=dtype, device=backend.device, topology=topology, rank=tp.rank
        )
        _require_copies(config, reader, stored, num_mtp_layers)
        return Model(config, reader, backend, tp, dcp, num_mtp_layers=num_mtp_layers, spans=spans)


def measure_shard(
    config: ModelConfig,
    stored: Mapping[str, TensorInfo],
    *,
    dtype: torch.dtype,
    backend: Backend,
    tp: Collectives,
    dcp: DcpGroup,
    num_mtp_layers: int,
    expert_parallel: bool = False,
) -> ShardBytes:
    """What `load_model` with these arguments reads and keeps; `stored` is what the checkpoint holds."""
    shapes = main_tensor_shapes(config) | mtp_tensor_shapes(config, num_mtp_layers)
    meter = SliceMeter(shapes | repeated_tensor_shapes(config), stored, config.weight_block_size)
    topology = _topology(tp, dcp, expert_parallel)
    reader = WeightReader(checkpoint=meter, dtype=dtype, topology=topology, rank=tp.rank)
    _require_copies(config, reader, stored, num_mtp_layers)
    num_compared = meter.weight_bytes
    Model(config, reader, backend, tp, dcp, num_mtp_layers=num_mtp_layers)
    return ShardBytes(file_bytes=meter.file_bytes, weight_bytes=meter.weight_bytes - num_compared)


def _topology(tp: Collectives, dcp: DcpGroup, expert_parallel: bool) -> Topology:
    return Topology(tp=tp.size, dcp=dcp.size, interleave=dcp.interleave, expert_parallel=expert_parallel)


def _require_copies(
    config: ModelConfig, reader: WeightReader, stored: Mapping[str, TensorInfo], num_mtp_layers: int
) -> None:
    """Errors: CheckpointError when a tensor that is used in place of its copy differs from it."""
    for copy, original in repeated_tensors(config, num_mtp_layers).items():
        if copy in stored:
            reader.require_copy(copy, original)


class Model:
    """Weights of one rank. Stateless between calls: all state is in the cache.

    Ranks of a group call the same methods in the same order with equal arguments; only the rows' slots and
    the cache are a rank's own. h and z are equal bits on every rank. Fastest under torch.inference_mode().
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        backend: Backend,
        tp: Collectives,
        dcp: DcpGroup,
        *,
        num_mtp_layers: int,
        spans: Spans | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.spans = spans or Spans(is_on=False)
        self.tp = tp
        self.dcp = dcp
        yarn = config.rope_scaling
        frequencies = rotary_frequencies(config.rope_theta, config.qk_rope_head_dim, reader.dtype, yarn)
        self.frequencies = frequencies.to(backend.device)
        self.rope_factor = yarn.embedding_factor if yarn is not None else 1.0
        self.embed_tokens = reader.vocabulary(EMBEDDING)
        self.layers = [
            DecoderLayer(config, layer, reader.under(layer_prefix(layer)), backend, tp, dcp)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = reader.norm(FINAL_NORM)
        self._next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        self.lm_head = backend.linear(Weight(reader.laid_out_for(backend).vocabulary(head)))
        end = config.num_hidden_layers + num_mtp_layers
        self.mtp_layers = [
            MtpLayer(config, layer, reader.under(layer_prefix(layer)), backend, tp, dcp)
            for layer in range(config.num_hidden_layers, end)
        ]
        self.vocab_start = reader.topology.vocabulary(config.vocab_size, tp.rank).start

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def forward(self, token_ids: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """h [T, hidden], after the final norm, of token_ids [T] int64 (T >= 1).

        Stores the KV of the rows that this rank owns, then attends to it.
        """
        ctx = self._context(rows, cache)
        plan = self._dense_plan(ctx)
        h = self._embed(token_ids)
        normed = self.backend.rms_norm(h, self.layers[0].input_norm, self.config.rms_norm_eps)
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            normed, plan = layer(h, normed, next_norm, plan, ctx)
        return normed

    def mtp_forward(
        self, token_ids: Tensor, prev_hidden: Tensor, rows: Rows, cache: KVCache, *, module: int = 0
    ) -> Tensor:
        """z [T, hidden] of MTP layer `module`, after shared_head.norm; its KV has a cache layer of its own.

        The row at position p takes t[p] and prev_hidden [T, hidden]: h[p-1] of `forward` for module 0, z[p-1]
        of the module before for the others and for a chained draft.
        """
        ctx = self._context(rows, cache)
        plan = self._dense_plan(ctx)
        return self.mtp_layers[module](self._embed(token_ids), prev_hidden, plan, ctx)

    def logits(self, h: Tensor) -> Tensor:
        """[R, ceil(V / tp)] of h [R, hidden]: the columns from vocab_start on, in float32 or float64.

        Serves target and MTP rows alike. Columns past the vocabulary are -inf.
        """
        logits = self.lm_head(h).to(accumulate_dtype(h.dtype))
        num_real = self.config.vocab_size - self.vocab_start
        if num_real < logits.shape[1]:
            logits[:, max(num_real, 0) :] = float("-inf")
        return logits

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.backend.embed(token_ids, self.embed_tokens, None)
        return self.tp.all_reduce(self.backend.embed(token_ids, self.embed_tokens, self.vocab_start))

    def _context(self, rows: Rows, cache: KVCache) -> PassContext:
        return PassContext(
            rows=rows,
            rope=self.backend.rotary_table(rows.positions, self.frequencies, self.rope_factor),
            cache=cache,
            is_dense=not self.config.has_indexer or rows.max_visible <= self.config.index_topk,
            spans=self.spans,
        )

    def _dense_plan(self, ctx: PassContext) -> SparseMLAPlan | None:
        """The one plan of all layers, or None where layers select."""
        if not ctx.is_dense:
            return None
        return self.backend.plan(self.backend.select_visible(ctx.rows, self.dcp))
