"""Each Triton kernel on one GPU: microseconds, the least time its bytes take, and the share of that reached.

Run: python -m benchmarks.gpu_kernels [--only TEXT]

Every kernel is timed as a graph that runs it on several sets of inputs in turn, together larger than the L2
cache. The floor is the bytes that must be read and written over the copy bandwidth measured in the same run
(bytes read plus bytes written of a large device-to-device copy).
"""

import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date

import torch
import triton

from benchmarks.harness import parser
from kernels_integration.kv_formats import StoredVectors, VectorFormat, key_format, latent_format
from kernels_integration.kv_layout import KVLayout
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.triton import (
    cache_write,
    experts,
    indexer,
    mla_attention,
    norms,
    plan_build,
    router,
    sampling,
)
from kernels_integration.triton.local_rows import LocalRows
from kernels_integration.triton.topk import select_best

_ROTATED_BYTES = 300 << 20
C, R, TOPK, INDEX_DIM, INDEX_HEADS = 512, 64, 2048, 128, 64
HIDDEN, WIDTH, NUM_EXPERTS, K, VOCABULARY = 2048, 1408, 64, 6, 102400


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel at one size: `calls` are the same work on different data."""

    name: str
    num_bytes: int
    """That one call must read and write; 0: no floor is given."""
    calls: list[Callable[[], object]]


def graph_us(calls: list[Callable[[], object]], *, repeats: int = 30) -> float:
    """Median over replays of a graph of all calls, for one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def num_sets(num_bytes: int) -> int:
    return max(2, min(16, -(-_ROTATED_BYTES // max(num_bytes, 1))))


def layout(kind: str) -> KVLayout:
    is_fp8 = kind == "fp8"
    return KVLayout(
        kv_cache_dtype="fp8_ds_mla" if is_fp8 else kind,
        indexer_kv_dtype=kind,
        latent_rank=C,
        rope_dim=R,
        index_dim=INDEX_DIM,
    )


def vectors(num_slots: int, format_: VectorFormat) -> StoredVectors:
    """Random vectors in a format."""
    cache = StoredVectors.allocate(num_slots, format_, "cuda")
    for start in range(0, num_slots, 1 << 18):
        part = cache.storage[start : start + (1 << 18)]
        part.copy_(format_.encode(torch.randn(len(part), format_.dim, device="cuda")))
    return cache


def equal_plan(rows: int, length: int, slots: torch.Tensor, num_parts: int) -> SparseMLAPlan:
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    return plan_build.build_plan(lens, num_parts, kv_indices=slots)


def attention(
    rows: int,
    heads: int,
    kind: str,
    *,
    length: int = TOPK,
    num_parts: int = 132,
    tiles: mla_attention.AttentionTiles | None = None,
    cache: StoredVectors | None = None,
) -> Work:
    """Rows over random slots of a cache that is far larger than the L2."""
    cache = cache or vectors(1 << 20, latent_format(layout(kind)))
    row_bytes = cache.storage.shape[1] * cache.storage.element_size()
    num_bytes = rows * (length * (row_bytes + 4) + heads * (C + R + C) * 2)
    calls = []
    for _ in range(num_sets(num_bytes)):
        slots = torch.randperm(cache.num_slots, device="cuda")[: rows * length].int()
        plan = equal_plan(rows, length, slots, num_parts)
        q = torch.randn(rows, heads, C + R, device="cuda", dtype=torch.bfloat16)
        o = torch.empty(rows, heads, C, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(rows, heads, device="cuda")

        def call(plan=plan, q=q, o=o, lse=lse) -> None:
            mla_attention.run(plan, q, cache, o, lse, sm_scale=0.04, tiles=tiles)

        calls.append(call)
    return Work(
        name=f"attention {kind}, {heads} heads, T {rows} x {length}", num_bytes=num_bytes, calls=calls
    )


def plan_build_work(rows: int) -> Work:
    lens = [torch.randint(0, 2049, (rows,), dtype=torch.int32, device="cuda") for _ in range(4)]
    slots = torch.empty(rows * 2048, dtype=torch.int32, device="cuda")
    calls = [lambda lens=one: plan_build.build_plan(lens, 132, kv_indices=slots) for one in lens]
    return Work(name=f"plan build, T {rows}", num_bytes=0, calls=calls)


def whole_rows(table: torch.Tensor, length: int) -> LocalRows:
    """A row of each request that sees all of its tokens."""
    rows = len(table)
    return LocalRows(
        visible_from=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        visible_to=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        request=torch.arange(rows, device="cuda"),
        page_table=table,
        page_size=64,
        max_visible=length,
    )


def index_scores(rows: int, length: int, kind: str) -> Work:
    cache = vectors(1 << 21, key_format(layout(kind)))
    row_bytes = cache.storage.shape[1] * cache.storage.element_size()
    num_bytes = rows * length * (row_bytes + 4)
    page = 64
    weights = torch.randn(rows, INDEX_HEADS, device="cuda")
    calls = []
    for _ in range(min(num_sets(num_bytes), 6)):
        table = torch.randint(0, cache.num_slots // page, (rows, length // page), device="cuda").int()
        q = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
        scores, local = torch.empty(rows, length, device="cuda"), whole_rows(table, length)

        def call(local=local, q=q, scores=scores) -> None:
            indexer.score_tokens(q, weights, cache, local, scores)

        calls.append(call)
    return Work(name=f"index scores {kind}, T {rows} x {length}", num_bytes=num_bytes, calls=calls)


def index_topk(rows: int, length: int) -> Work:
    page = 64
    table = torch.arange(rows * length // page, device="cuda").view(rows, -1).int()
    local = whole_rows(table, length)
    indptr = torch.arange(rows + 1, device="cuda").int() * min(TOPK, length)
    num_bytes = rows * (length * 4 + TOPK * 4)
    calls = []
    for _ in range(min(num_sets(num_bytes), 8)):
        scores = torch.randn(rows, length, device="cuda")
        out = torch.empty(rows * TOPK, dtype=torch.int32, device="cuda")

        def call(scores=scores, out=out) -> None:
            select_best(scores, local, indptr, out, topk=TOPK)

        calls.append(call)
    return Work(name=f"top-k {TOPK} of {length}, T {rows}", num_bytes=num_bytes, calls=calls)


def small_kernels(rows: int) -> Iterator[Work]:
    bf16 = torch.bfloat16
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=bf16)
    h, out, weight = torch.randn_like(x), torch.empty_like(x), torch.ones(HIDDEN, device="cuda")
    yield Work(
        name=f"residual + norm, T {rows} x {HIDDEN}",
        num_bytes=rows * HIDDEN * 2 * 4,
        calls=[lambda: norms.add_rms_norm(x, h, weight, 1e-6, out)] * 4,
    )
    table = torch.randn(rows, R // 2, 2, device="cuda")
    q = torch.randn(rows, 16, C + R, device="cuda", dtype=bf16)[..., C:]
    yield Work(
        name=f"rope, T {rows} x 16 heads",
        num_bytes=rows * 16 * R * 4,
        calls=[lambda: norms.rotate_pairs(q, table, q)] * 4,
    )
    slots = torch.randperm(1 << 16, device="cuda")[:rows]
    latents = torch.randn(rows, C + R, device="cuda", dtype=bf16)
    keys = torch.randn(rows, INDEX_DIM, device="cuda", dtype=bf16)
    c_weight, k_weight = torch.ones(C, device="cuda"), torch.ones(INDEX_DIM, device="cuda")
    for kind in ("bfloat16", "fp8"):
        cache = vectors(1 << 16, latent_format(layout(kind)))
        key_cache = vectors(1 << 16, key_format(layout(kind)))
        yield Work(
            name=f"latent write {kind}, T {rows}",
            num_bytes=rows * (C + R) * 4,
            calls=[
                lambda cache=cache: cache_write.write_latents(latents, c_weight, 1e-6, table, slots, cache)
            ]
            * 4,
        )
        yield Work(
            name=f"index key write {kind}, T {rows}",
            num_bytes=rows * INDEX_DIM * 4,
            calls=[
                lambda cache=key_cache: cache_write.write_index_keys(
                    keys, k_weight, k_weight, 1e-6, table, slots, cache
                )
            ]
            * 4,
        )


def routed_experts(rows: int) -> Iterator[Work]:
    bf16 = torch.bfloat16
    logits = torch.randn(rows, NUM_EXPERTS, device="cuda")
    bias = torch.zeros(NUM_EXPERTS, device="cuda")
    chosen = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    weights = torch.empty(rows, K, device="cuda")

    def choose() -> None:
        router.route(
            logits.unsqueeze(0),
            bias,
            chosen,
            weights,
            num_groups=1,
            topk_group=1,
            normalise=True,
            scaling_factor=2.5,
        )

    yield Work(name=f"route, T {rows}", num_bytes=0, calls=[choose] * 4)
    choose()
    yield Work(
        name=f"group pairs, T {rows}",
        num_bytes=0,
        calls=[lambda: experts.group_pairs(chosen, NUM_EXPERTS)] * 4,
    )
    tiles = experts.group_pairs(chosen, NUM_EXPERTS)
    hit = int(chosen.unique().numel())
    num_bytes = hit * 3 * HIDDEN * WIDTH * 2 + rows * HIDDEN * 4
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=bf16)
    out = torch.zeros_like(x)
    calls = []
    for _ in range(min(4, num_sets(num_bytes))):
        gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, device="cuda", dtype=bf16) * 0.02
        down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, device="cuda", dtype=bf16) * 0.02
        calls.append(
            lambda gate_up=gate_up, down=down: experts.run_experts(x, gate_up, down, tiles, weights, out)
        )
    yield Work(name=f"experts bfloat16, T {rows} ({hit} hit)", num_bytes=num_bytes, calls=calls)


def draws(rows: int) -> Work:
    sets = [torch.randn(rows, VOCABULARY, device="cuda") for _ in range(4)]
    temperature = torch.ones(rows, device="cuda")
    seed, tokens = torch.arange(rows, device="cuda"), torch.empty(rows, dtype=torch.int64, device="cuda")
    calls = [lambda x=logits: sampling.draw(x, temperature, seed, seed, tokens) for logits in sets]
    return Work(name=f"draw, T {rows} x {VOCABULARY}", num_bytes=rows * VOCABULARY * 4, calls=calls)


def works() -> Iterator[tuple[str, Callable[[], object]]]:
    """(what it is about, how to make it): only what is asked for is made."""
    for rows in (1, 16, 128):
        yield "attention sparse bf16", lambda rows=rows: attention(rows, 16, "bfloat16")
    yield "attention sparse fp8", lambda: attention(128, 16, "fp8")
    yield "attention sparse bf16 128 heads", lambda: attention(128, 128, "bfloat16")
    yield "attention dense bf16", lambda: attention(16, 16, "bfloat16", length=32768)
    for rows in (1, 64, 512):
        yield "plan", lambda rows=rows: plan_build_work(rows)
    for kind in ("bfloat16", "fp8"):
        yield "index scores", lambda kind=kind: index_scores(64, 32768, kind)
        yield "index scores", lambda kind=kind: index_scores(1, 32768, kind)
    for rows, length in ((1, 32768), (64, 32768), (1, 131072)):
        yield "top-k", lambda rows=rows, length=length: index_topk(rows, length)
    yield "small", lambda: small_kernels(64)
    for rows in (1, 16, 64):
        yield "experts", lambda rows=rows: routed_experts(rows)
    yield "draw", lambda: draws(64)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="only what has this in its name")
    only = arguments.parse_args().only
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_kernels needs a CUDA GPU, and this machine's torch finds none")
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, {date.today().isoformat()}; copy {bandwidth / 1e6:.2f} TB/s"
    )
    print(f"{'kernel':44} {'us':>9} {'floor us':>9} {'reached':>8}")
    for name, make in works():
        if only not in name:
            continue
        made = make()
        for work in [made] if isinstance(made, Work) else made:
            us = graph_us(work.calls)
            floor = work.num_bytes / bandwidth
            shown = f"{floor:9.1f} {floor / us:8.2f}" if work.num_bytes else f"{'-':>9} {'-':>8}"
            print(f"{work.name:44} {us:9.1f} {shown}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
