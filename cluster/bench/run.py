"""One benchmark run: the same workload for every number of drafts, and for transformers."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from actors.config import GroupConfig
from cluster.answering.engine import Engine, start_engine
from cluster.bench.breakdown import step_breakdown
from cluster.bench.measure import Measurement, Reference, measure_engine
from cluster.bench.profile import MachineLimits, ProfileRow, machine_limits, profile_rows
from cluster.bench.workload import Workload, text_workload
from cluster.config import EngineArgs
from cluster.config.resolve import resolve
from cluster.frontend.front_end import ModelFrontend
from cluster.report.trace import TraceFile
from kernels_integration.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds a step by part, the longest first."""

    batch_size: int
    num_drafts: int
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step by operation, where the group ran as `executor` says: inside a process, or on Ray."""

    executor: str
    batch_size: int
    num_drafts: int
    rows: tuple[ProfileRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    measurements: tuple[Measurement, ...]
    breakdowns: tuple[Breakdown, ...]
    profiles: tuple[Profile, ...] = ()
    limits: MachineLimits | None = None
    """What the profiles' operations are compared with."""

    def ratio(self, measurement: Measurement) -> float | None:
        """Throughput relative to transformers at the same batch; None where it was not measured."""
        if measurement.num_drafts is None:
            return None
        for other in self.measurements:
            if other.num_drafts is None and other.batch_size == measurement.batch_size:
                return measurement.tokens_per_s / other.tokens_per_s
        return None


def run_bench(
    args: EngineArgs,
    *,
    batch_sizes: Sequence[int],
    drafts: Sequence[int],
    input_len: int,
    output_len: int,
    with_reference: bool,
    with_profile: bool = False,
    progress: Callable[[str], None],
) -> BenchResult:
    """with_profile: a step by operation too, inline and on Ray.

    Errors: ConfigError for settings that do not fit each other; those of launch_group.
    """
    config = resolve(args)
    if with_profile and config.device != "cpu":
        raise ConfigError(
            f"--profile times operations on a CPU, and device is {config.device}; use --device cpu"
        )
    frontend = ModelFrontend.of_group(config)
    workload = text_workload(
        frontend,
        num_prompts=max(batch_sizes),
        input_len=input_len,
        output_len=output_len,
        max_model_len=config.max_model_len,
    )
    measurements: list[Measurement] = []
    breakdowns: list[Breakdown] = []
    profiles: list[Profile] = []
    if with_reference:
        progress("measuring transformers")
        peer = Reference(config.model_path, config.dtype)
        measurements += [peer.measure(workload, batch_size) for batch_size in batch_sizes]
        del peer
    trace_file = None if args.trace is None else TraceFile(args.trace)
    for num_drafts in drafts:
        changes = {
            "num_speculative_tokens": num_drafts,
            "speculative_config": None,
            "dynamic_speculative_decoding": False,
            "num_speculative_tokens_per_batch_size": None,
        }
        changed = args.model_copy(update=changes)
        measured = _measure_group(changed, frontend, workload, batch_sizes, trace_file, progress)
        measurements += measured[0]
        breakdowns += measured[1]
        if with_profile:
            profiles += _profiles(changed, frontend, workload, batch_sizes, progress)
    if trace_file is not None:
        trace_file.write()
    measurements.sort(key=lambda m: m.batch_size)
    return BenchResult(
        measurements=tuple(measurements),
        breakdowns=tuple(breakdowns),
        profiles=tuple(profiles),
        limits=machine_limits(config.dtype, num_threads=1) if with_profile else None,
    )


def _measure_group(
    args: EngineArgs,
    frontend: ModelFrontend,
    workload: Workload,
    batch_sizes: Sequence[int],
    trace_file: TraceFile | None,
    progress: Callable[[str], None],
) -> tuple[list[Measurement], list[Breakdown]]:
    """Throughput of an untraced group, then the parts of a step of a traced one."""
    config = replace(resolve(args), trace=False)
    measurements, breakdowns = [], []
    with closing(_engine(config, args, frontend, progress)) as engine:
        progress(f"measuring {config.num_speculative_tokens} drafts")
        short = replace(workload, output_len=8)
        measure_engine(engine, short, max(batch_sizes), config.num_speculative_tokens)
        for batch_size in batch_sizes:
            measurements.append(measure_engine(engine, workload, batch_size, config.num_speculative_tokens))
    with closing(_engine(replace(config, trace=True), args, frontend, progress)) as engine:
        measure_engine(engine, short, max(batch_sizes), config.num_speculative_tokens)
        for batch_size in batch_sizes:
            before = engine.stats()
            engine.take_trace()
            measure_engine(engine, workload, batch_size, config.num_speculative_tokens)
            trace = engine.take_trace()
            if trace_file is not None:
                trace_file.add(trace, f"{config.num_speculative_tokens} drafts, batch {batch_size}:")
            parts = step_breakdown(trace["shard 0"], before, engine.stats())
            breakdowns.append(
                Breakdown(
                    batch_size=batch_size,
                    num_drafts=config.num_speculative_tokens,
                    parts=tuple(parts),
                )
            )
    return measurements, breakdowns


def _profiles(
    args: EngineArgs,
    frontend: ModelFrontend,
    workload: Workload,
    batch_sizes: Sequence[int],
    progress: Callable[[str], None],
) -> list[Profile]:
    """Of rank 0, once inside this process and once on Ray."""
    config = replace(resolve(args), trace=True, profile=True)
    profiles = []
    for executor in ("inline", "ray"):
        with closing(_engine(config, args, frontend, progress, executor)) as engine:
            progress(f"profiling {config.num_speculative_tokens} drafts, {executor}")
            measure_engine(
                engine, replace(workload, output_len=8), max(batch_sizes), config.num_speculative_tokens
            )
            for batch_size in batch_sizes:
                before = engine.stats()
                engine.take_trace()
                measure_engine(engine, workload, batch_size, config.num_speculative_tokens)
                rows = profile_rows(engine.take_trace()["shard 0"], before, engine.stats())
                profiles.append(
                    Profile(
                        executor=executor,
                        batch_size=batch_size,
                        num_drafts=config.num_speculative_tokens,
                        rows=tuple(rows),
                    )
                )
    return profiles


def _engine(
    config: GroupConfig,
    args: EngineArgs,
    frontend: ModelFrontend,
    progress: Callable[[str], None],
    executor: str = "ray",
) -> Engine:
    return start_engine(
        config,
        executor=executor,
        tokenizer=frontend.tokenizer.backend,
        address=args.address,
        progress=progress,
    )
