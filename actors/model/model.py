"""The forward pass of one rank: embedding, decoder layers, final norm, head; and the MTP layers.

T packed rows, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.decoder import DecoderLayer
from actors.model.layers import rms_norm, rotary_frequencies, rotary_table
from actors.model.linear import Linear
from actors.model.load_progress import LoadProgress
from actors.model.mla import PassContext
from actors.model.mtp import MtpLayer
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
from actors.model.weights import WeightReader, accumulate_dtype
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import CheckpointError
from kernels_integration.kv_cache import KVCache
from kernels_integration.planner import StepPlanner
from kernels_integration.rows import RowBatch
from kernels_integration.selection import select_visible
from kernels_integration.spans import Spans


def load_model(
    config: ModelConfig,
    path: str | Path,
    *,
    dtype: torch.dtype,
    tp: Collectives,
    dcp: DcpGroup,
    num_mtp_layers: int,
    expert_parallel: bool = False,
    spans: Spans | None = None,
    progress: LoadProgress | None = None,
) -> "Model":
    """Rank `tp.rank`'s part of the checkpoint at `path`; only that part is read.

    The DCP group is `dcp.size` consecutive ranks of `tp`: dcp.rank == tp.rank % dcp.size.
    num_mtp_layers: how many MTP layers to load, from the first.
    expert_parallel: whole routed experts on each rank, instead of a part of each.
    progress: told of the bytes to read and read, for other threads to look at.

    Errors: ConfigError: sizes that cannot be split so. CheckpointError: tensors that are missing, unexpected,
    wrongly shaped or not finite, files that cannot be read.
    """
    config.check_parallel(tp.size, dcp.size)
    if num_mtp_layers > config.num_mtp_layers == 0:
        raise CheckpointError(
            f"{path} has no MTP layer (num_nextn_predict_layers 0) to draft with; use 0 speculative tokens"
        )
    assert num_mtp_layers <= config.num_mtp_layers
    progress = progress or LoadProgress()
    with Checkpoint(path, config.weight_block_size) as checkpoint:
        required = main_tensor_shapes(config) | mtp_tensor_shapes(config, num_mtp_layers)
        checkpoint.check(required, repeated_tensor_shapes(config) | mtp_tensor_shapes(config))
        size = measure_shard(
            config,
            checkpoint.tensors,
            dtype=dtype,
            tp=tp,
            dcp=dcp,
            num_mtp_layers=num_mtp_layers,
            expert_parallel=expert_parallel,
        )
        progress.begin(size.file_bytes)
        checkpoint.on_read = progress.advance
        reader = WeightReader(
            checkpoint=checkpoint, dtype=dtype, rank=tp.rank, size=tp.size, expert_parallel=expert_parallel
        )
        _require_copies(config, reader, checkpoint.tensors, num_mtp_layers)
        return Model(config, reader, tp, dcp, num_mtp_layers=num_mtp_layers, spans=spans)


def measure_shard(
    config: ModelConfig,
    stored: Mapping[str, TensorInfo],
    *,
    dtype: torch.dtype,
    tp: Collectives,
    dcp: DcpGroup,
    num_mtp_layers: int,
    expert_parallel: bool = False,
) -> ShardBytes:
    """What `load_model` with these arguments reads and keeps; `stored` is what the checkpoint holds."""
    shapes = main_tensor_shapes(config) | mtp_tensor_shapes(config, num_mtp_layers)
    meter = SliceMeter(shapes | repeated_tensor_shapes(config), stored)
    reader = WeightReader(
        checkpoint=meter, dtype=dtype, rank=tp.rank, size=tp.size, expert_parallel=expert_parallel
    )
    _require_copies(config, reader, stored, num_mtp_layers)
    num_compared = meter.weight_bytes
    Model(config, reader, tp, dcp, num_mtp_layers=num_mtp_layers)
    return ShardBytes(file_bytes=meter.file_bytes, weight_bytes=meter.weight_bytes - num_compared)


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
        tp: Collectives,
        dcp: DcpGroup,
        *,
        num_mtp_layers: int,
        spans: Spans | None = None,
    ) -> None:
        self.config = config
        self.spans = spans or Spans(is_on=False)
        self.tp = tp
        yarn = config.rope_scaling
        self.frequencies = rotary_frequencies(config.rope_theta, config.qk_rope_head_dim, reader.dtype, yarn)
        self.rope_factor = yarn.embedding_factor if yarn is not None else 1.0
        self.embed_tokens = reader.vocabulary(EMBEDDING)
        self.layers = [
            DecoderLayer(config, layer, reader.under(layer_prefix(layer)), tp, dcp)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = reader.norm(FINAL_NORM)
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        self.lm_head = Linear(reader.transposed().vocabulary(head))
        end = config.num_hidden_layers + num_mtp_layers
        self.mtp_layers = [
            MtpLayer(config, layer, reader.under(layer_prefix(layer)), tp, dcp)
            for layer in range(config.num_hidden_layers, end)
        ]
        self.vocab_start = tp.rank * self.embed_tokens.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def forward(self, token_ids: Tensor, rows: RowBatch, cache: KVCache, planner: StepPlanner) -> Tensor:
        """h [T, hidden], after the final norm, of token_ids [T] int64 (T >= 1).

        Stores the KV of the rows that this rank owns, then attends to it.
        """
        ctx = self._context(rows, cache, planner)
        h = self._embed(token_ids)
        for layer in self.layers:
            h = layer(h, ctx)
        return rms_norm(h, self.norm, self.config.rms_norm_eps)

    def mtp_forward(
        self,
        token_ids: Tensor,
        prev_hidden: Tensor,
        rows: RowBatch,
        cache: KVCache,
        planner: StepPlanner,
        *,
        module: int = 0,
    ) -> Tensor:
        """z [T, hidden] of MTP layer `module`, after shared_head.norm; its KV has a cache layer of its own.

        The row at position p takes t[p] and prev_hidden [T, hidden]: h[p-1] of `forward` for module 0, z[p-1]
        of the module before for the others and for a chained draft.
        """
        context = self._context(rows, cache, planner)
        return self.mtp_layers[module](self._embed(token_ids), prev_hidden, context)

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
            return F.embedding(token_ids, self.embed_tokens)
        local = token_ids - self.vocab_start
        here = (local >= 0) & (local < self.embed_tokens.shape[0])
        rows = F.embedding(local.where(here, 0), self.embed_tokens)
        return self.tp.all_reduce(rows.mul_(here.unsqueeze(-1)))

    def _context(self, rows: RowBatch, cache: KVCache, planner: StepPlanner) -> PassContext:
        dense = not self.config.has_indexer or rows.max_visible <= self.config.index_topk
        return PassContext(
            rows=rows,
            rope=rotary_table(rows.positions, self.frequencies, self.rope_factor),
            cache=cache,
            planner=planner,
            dense_plan=planner.plan(select_visible(rows)) if dense else None,
            spans=self.spans,
        )
