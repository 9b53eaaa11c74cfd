"""What the memory of a GPU goes to, reckoned before a group starts: what is left is the KV cache's."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from actors.messages import PENDING_CAPACITY
from actors.model.checkpoint_files import CheckpointFiles
from actors.model.config import ModelConfig
from cluster.config.args import EngineArgs
from cluster.config.sizes import format_size
from kernels_integration.errors import ConfigError

_RUNTIME_BYTES = 1 << 30
"""The driver's context, libraries and compiled kernels."""
_SCORE_BYTES = 768 << 20
"""Indexer scores of a long prompt, which are computed in turns, and the candidates among them."""
_PARTIAL_BYTES = 512 << 20
"""Parts of attention's rows in fixed splits, of a step at once and of those that graphs keep."""
_LIVE_LOGITS = 8
"""Copies of a step's logits: the product, in float32, and what graphs of several shapes keep."""
_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBudget:
    """Bytes of one GPU. All but the first two are one shard's."""

    total: int
    used: int
    """By other programs, or before this group."""
    utilization: float
    weights: int
    steps: int
    """What a step computes with, graphs included: an estimate from above."""
    state: int
    """Of requests: pending rows and block tables."""

    @property
    def kv_cache(self) -> int:
        """What is left; not above 0 where nothing is."""
        taken = self.used + self.weights + self.steps + self.state + _RUNTIME_BYTES
        return int(self.total * self.utilization) - taken

    def __str__(self) -> str:
        return (
            f"{self.utilization:g} of {format_size(self.total)}: in use {format_size(self.used)}, "
            f"weights {format_size(self.weights)}, steps and graphs {format_size(self.steps)}, "
            f"state {format_size(self.state)}, runtime {format_size(_RUNTIME_BYTES)}"
        )

    def require(self, least: int) -> int:
        """`kv_cache`, at least `least`. Errors: ConfigError that shows where the memory went."""
        if self.kv_cache < least:
            needed = least - self.kv_cache + int(self.total * self.utilization)
            raise ConfigError(
                f"gpu-memory-utilization {self} leaves nothing for the KV cache, which needs at least "
                f"{format_size(least)}; that takes {format_size(needed)} in all: free memory of the GPU, "
                "raise --gpu-memory-utilization, or lower --max-num-seqs, --max-num-batched-tokens or "
                "--max-model-len"
            )
        return self.kv_cache


def gpu_budget(args: EngineArgs, model: ModelConfig, *, dtype: str, num_speculative_tokens: int) -> GpuBudget:
    """Of this machine's GPU, for one shard. Reads headers of the checkpoint, no weights."""
    total, free = memory_bytes()
    length = args.max_model_len or model.max_model_len
    return GpuBudget(
        total=total,
        used=total - free,
        utilization=args.gpu_memory_utilization,
        weights=_weight_bytes(args, model, dtype, num_speculative_tokens),
        steps=_step_bytes(args, model, dtype, num_speculative_tokens, length),
        state=(args.max_num_seqs + 1)
        * (
            (PENDING_CAPACITY + 1) * model.hidden_size * _ITEM_BYTES[dtype]
            + 8 * -(-length // args.block_size)
        ),
    )


@functools.cache
def memory_bytes() -> tuple[int, int]:
    """(total, free). In a process of its own: whoever asks a driver keeps some of the memory."""
    ask = "import torch; free, total = torch.cuda.mem_get_info(); print(total, free)"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ConfigError(
            "device cuda: the GPU does not tell its memory: " + answer.stderr.strip().rpartition("\n")[2]
        )
    total, free = answer.stdout.split()
    return int(total), int(free)


def _weight_bytes(args: EngineArgs, model: ModelConfig, dtype: str, num_speculative_tokens: int) -> int:
    import torch

    from actors.model.model import measure_shard
    from kernels_integration.collectives import SoloCollectives
    from kernels_integration.dcp import DcpGroup
    from kernels_integration.reference.backend import TorchBackend

    stored = {}
    if args.load_format != "dummy":
        files = CheckpointFiles(Path(args.model).expanduser().absolute())
        files.close()
        stored = dict(files.tensors)
    solo, of_torch = SoloCollectives(), getattr(torch, dtype)
    return measure_shard(
        model,
        stored,
        dtype=of_torch,
        backend=TorchBackend(of_torch),
        tp=solo,
        dcp=DcpGroup(1, solo),
        num_mtp_layers=model.num_drafting_layers(num_speculative_tokens),
    ).weight_bytes


def _step_bytes(
    args: EngineArgs, model: ModelConfig, dtype: str, num_speculative_tokens: int, length: int
) -> int:
    """The widest tensors that one step holds at a time."""
    item, rows = _ITEM_BYTES[dtype], args.max_num_batched_tokens
    drawn = args.max_num_seqs * (num_speculative_tokens + 1)
    pairs = rows * model.num_experts_per_tok
    experts = pairs * (model.moe_intermediate_size * item + model.hidden_size * 4)
    heads = model.num_attention_heads * (model.qk_head_dim + 2 * model.latent_dim)
    hidden = rows * (8 * model.hidden_size + 3 * model.intermediate_size + heads) * item
    listed = rows * 4 * (2 * model.index_topk if model.has_indexer else length)
    scores = _SCORE_BYTES if model.has_indexer else 0
    parts = _PARTIAL_BYTES if args.deterministic else 0
    logits = _LIVE_LOGITS * 4 * drawn * model.vocab_size
    return experts + hidden + listed + scores + parts + logits
