"""A model of 16 B parameters (2.84 B active) on one GPU: milliseconds a decode step, scheduling included.

Run: python -m benchmarks.gpu_engine [--models dsa fp8 dense drafts] [--profile] [--only 32k/64]

Random weights, made on the device; DeepSeek-V3.2's architecture at the widths of V2-Lite. The KV of the
prompts is random: of each chunk only the last row is computed, so that a long context costs no prefill. Time
of a step: the mean interval between steps in which all requests decode, over three repeats, the whole engine
in one process. floor: the bytes that a step must read (weights once, experts by expectation, KV rows) at
4.28 TB/s. vLLM 0.26.0 was measured by the same method on the same kind of card.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from actors import inline_group as inline
from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.messages import RowKind, StepInput, StepOutput
from actors.model.model import Model
from actors.shard.build import allocate_cache, assemble, load_weights
from actors.shard.device_shard import DeviceShard
from benchmarks.harness import config, machine, parser, request
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.spans import Span, Spans

_BLOCK_SIZE = 64
_ROOM = 512
"""Tokens of each request beside its context."""
_FILLED_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the table, with what others reached."""

    context: int
    batch: int
    vllm_ms: float
    floor_ms: float

    @property
    def name(self) -> str:
        return f"{self.context // 1024}k/{self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is loaded once for several cases."""

    name: str
    is_sparse: bool
    kv_cache_dtype: str
    num_drafts: int
    cases: tuple[Case, ...]


def _cases(*cells: tuple[int, int, float, float]) -> tuple[Case, ...]:
    return tuple(Case(context=c * 1024, batch=b, vllm_ms=v, floor_ms=f) for c, b, v, f in cells)


_DSA = _cases(
    (32, 1, 4.10, 1.37),
    (32, 16, 9.77, 6.71),
    (32, 64, 14.16, 10.12),
    (1, 1, 3.77, 1.34),
    (1, 16, 8.87, 6.18),
    (1, 64, 11.23, 8.01),
    (1, 128, 12.54, 8.62),
)
_FP8 = _cases(
    (32, 1, 4.29, 1.36),
    (32, 16, 10.07, 6.61),
    (32, 64, 14.97, 9.71),
    (32, 128, 18.58, 12.02),
    (1, 1, 4.00, 1.33),
    (1, 16, 9.28, 6.12),
    (1, 64, 12.40, 7.78),
    (1, 128, 14.13, 8.16),
)
_DENSE = _cases((32, 1, 3.92, 1.40), (32, 16, 11.89, 9.69), (32, 64, 26.50, 22.55))
_DRAFTS = _cases(
    (32, 1, 12.80, 3.42),
    (32, 16, 16.28, 9.86),
    (32, 64, 26.54, 14.43),
    (1, 1, 14.30, 3.37),
    (1, 16, 14.80, 8.97),
    (1, 64, 17.22, 10.84),
)
_VARIANTS = {
    "dsa": Variant(name="DSA bf16", is_sparse=True, kv_cache_dtype="bfloat16", num_drafts=0, cases=_DSA),
    "fp8": Variant(name="DSA fp8 KV", is_sparse=True, kv_cache_dtype="fp8_ds_mla", num_drafts=0, cases=_FP8),
    "dense": Variant(
        name="dense bf16", is_sparse=False, kv_cache_dtype="bfloat16", num_drafts=0, cases=_DENSE
    ),
    "drafts": Variant(
        name="DSA, 3 drafts", is_sparse=True, kv_cache_dtype="bfloat16", num_drafts=3, cases=_DRAFTS
    ),
}

_MODEL = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}


def write_config(folder: Path, *, is_sparse: bool) -> None:
    kind = (
        ("deepseek_v32", "DeepseekV32ForCausalLM") if is_sparse else ("deepseek_v3", "DeepseekV3ForCausalLM")
    )
    written = _MODEL | (_INDEXER if is_sparse else {}) | {"model_type": kind[0], "architectures": [kind[1]]}
    (folder / "config.json").write_text(json.dumps(written))


class LastRows:
    """A shard that computes of every chunk its last row alone: the KV before it is there."""

    def __init__(self, shard: DeviceShard) -> None:
        self._shard = shard

    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        counts = np.diff(step.ids_indptr)
        is_chunk = step.kind != RowKind.VERIFY
        if is_chunk.any():
            step = msgspec.structs.replace(
                step,
                start=np.where(is_chunk, step.start + counts - 1, step.start).astype(np.int32),
                ids=step.ids[step.ids_indptr[1:][is_chunk] - 1],
                ids_indptr=np.concatenate([[0], np.cumsum(is_chunk)]).astype(np.int32),
            )
        self._shard.execute(step, report)

    def settle(self, *, wait: bool) -> bool:
        return self._shard.settle(wait=wait)

    def take_spans(self) -> list[Span]:
        return self._shard.take_spans()


def fill(vectors: StoredVectors) -> None:
    """Random vectors, the same ones over and over: a cache of many gigabytes is filled in no time."""
    storage = vectors.storage
    drawn = torch.randn(min(_FILLED_AT_ONCE, len(storage)), vectors.dim, device=storage.device)
    encoded = vectors.format.encode(drawn)
    for start in range(0, len(storage), len(encoded)):
        part = storage[start : start + len(encoded)]
        part.copy_(encoded[: len(part)])


def settings(
    variant: Variant, folder: Path, batch: int, context: int, num_kv_blocks: int, *, deterministic: bool
) -> GroupConfig:
    return config(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        attention_backend="triton",
        dtype="bfloat16",
        kv_cache_dtype=variant.kv_cache_dtype,
        num_speculative_tokens=variant.num_drafts,
        block_size=_BLOCK_SIZE,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=batch,
        max_model_len=context + _ROOM,
        max_num_batched_tokens=batch * (context + 1) + 1,
        long_prefill_token_threshold=0,
        enable_prefix_caching=False,
        deterministic=deterministic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    ms: list[float]
    """One mean a repeat."""
    host_us: float
    """Of a step, in all threads, waiting for the device left out."""


class Engine:
    """One variant: weights and cache that all of its cases share."""

    def __init__(
        self, variant: Variant, folder: Path, cases: list[Case], *, deterministic: bool = False
    ) -> None:
        self.variant, self._folder, self._deterministic = variant, folder, deterministic
        self._blocks = max(-(-(c.context + _ROOM) // _BLOCK_SIZE) * c.batch for c in cases) + 8
        first = self._settings(1, cases[0].context)
        self._solo, self._spans = SoloCollectives(), Spans(is_on=False)
        self._dcp = DcpGroup(1, self._solo, "a2a")
        self.model: Model = load_weights(first, tp=self._solo, dcp=self._dcp, spans=self._spans)
        self.cache: KVCache = allocate_cache(first, self.model)
        for vectors in (*self.cache.latents, *self.cache.keys):
            fill(vectors)

    def _settings(self, batch: int, context: int) -> GroupConfig:
        return settings(
            self.variant, self._folder, batch, context, self._blocks, deterministic=self._deterministic
        )

    def group(self, case: Case, *, trace: bool = False) -> InlineGroup:
        """All requests decode after its first step."""
        resolved = self._settings(case.batch, case.context)
        resolved = replace(resolved, trace=trace)

        def build(config, *, tp, dcp_comm, spans):
            shard = assemble(config, self.model, self.cache, tp=tp, dcp=self._dcp, spans=spans)
            assert isinstance(shard, DeviceShard)
            return LastRows(shard)

        inline.build_shard, real = build, inline.build_shard
        try:
            group = InlineGroup(resolved)
        finally:
            inline.build_shard = real
        generator = np.random.default_rng(0)
        for i in range(case.batch):
            prompt = generator.integers(3, _MODEL["vocab_size"], case.context - 1).tolist()
            group.submit(request(str(i), prompt, num_tokens=_ROOM - 8))
        return group

    def measure(self, case: Case, *, warm: int = 12, steps: int = 100, repeats: int = 3) -> Measured:
        group = self.group(case)
        for _ in range(warm):
            group.step()
        means = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(steps):
                group.step()
            means.append((time.perf_counter() - start) / steps * 1e3)
        if group.stats().running < case.batch:
            raise SystemExit(f"{case.name}: requests ended while they were measured")
        group.close()
        return Measured(ms=means, host_us=self._host_us(case))

    def _host_us(self, case: Case, *, warm: int = 8, steps: int = 30) -> float:
        group = self.group(case, trace=True)
        for _ in range(warm):
            group.step()
        group.take_trace()
        before = group.stats()
        for _ in range(steps):
            group.step()
        after, spans = group.stats(), group.take_trace()["shard 0"]
        group.close()
        coordinator = after.schedule_s + after.process_s - before.schedule_s - before.process_s
        by_name = {
            name: sum(span.duration_ns for span in spans if span.name == name) for name in ("step", "wait")
        }
        return (coordinator * 1e6 + (by_name["step"] - by_name["wait"]) / 1e3) / steps

    def profile(self, case: Case, *, steps: int = 20, top: int = 40) -> None:
        """Where the device's time of a step goes, kernel by kernel."""
        group = self.group(case)
        for _ in range(12):
            group.step()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            start = time.perf_counter()
            for _ in range(steps):
                group.step()
            wall = time.perf_counter() - start
            torch.cuda.synchronize()
        group.close()
        kernels: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
        busy = sum(map(sum, kernels.values()))
        launches = sum(map(len, kernels.values())) / steps
        print(
            f"profile of {self.variant.name} {case.name}: {wall / steps * 1e3:.2f} ms a step under it, "
            f"busy {busy / steps / 1e3:.2f} ms, {launches:.0f} launches"
        )
        for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:top]:
            print(
                f"  {sum(times) / steps:9.1f} us {len(times) / steps:7.1f} x "
                f"{statistics.median(times):7.1f}  {name[:100]}",
                flush=True,
            )


def chosen(variant: Variant, only: list[str]) -> Iterator[Case]:
    for case in variant.cases:
        if not only or case.name in only:
            yield case


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(_VARIANTS), default=list(_VARIANTS))
    arguments.add_argument("--only", nargs="*", default=[], help="cells, such as 32k/64")
    arguments.add_argument("--profile", nargs="*", default=[], help="cells whose kernels are listed")
    arguments.add_argument("--steps", type=int, default=100, help="of one repeat, at most 150")
    arguments.add_argument(
        "--deterministic", action="store_true", help="what one stream in every batch costs"
    )
    arguments.add_argument("--top", type=int, default=40, help="kernels listed")
    given = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_engine needs a CUDA GPU, and this machine's torch finds none")
    import triton

    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}; {machine()}")
    for key in given.models:
        variant = _VARIANTS[key]
        cases = list(chosen(variant, given.only))
        if not cases:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_config(Path(folder), is_sparse=variant.is_sparse)
            start = time.perf_counter()
            engine = Engine(variant, Path(folder), cases, deterministic=given.deterministic)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(f"{variant.name}: loaded in {seconds:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
            print(
                f"{'cell':14} {'ms':>7} {'spread':>7} {'vLLM':>7} {'x vLLM':>7} {'floor':>7} {'host us':>8}"
            )
            for case in cases:
                got = engine.measure(case, steps=given.steps)
                ms = statistics.median(got.ms)
                print(
                    f"{case.name:9} {ms:7.2f} {max(got.ms) - min(got.ms):7.2f} {case.vllm_ms:7.2f} "
                    f"{ms / case.vllm_ms:6.2f} {case.floor_ms:7.2f} {got.host_us:8.0f}",
                    flush=True,
                )
                if case.name in given.profile:
                    engine.profile(case, top=given.top)
            del engine
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
