"""What the benchmarks share: flags, the machine's name, timing, groups and requests."""

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request
from actors.sampling_params import SamplingParams
from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Its help is the module's docstring, as written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def machine() -> str:
    """What a result belongs to: processor, cores that may be used, versions, day."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = names[0] if names else platform.processor()
    cores = len(os.sched_getaffinity(0))
    return (
        f"{processor}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{date.today().isoformat()}"
    )


def best_us(work: Callable[[], object], *, calls: int = 1, rounds: int = 7) -> float:
    """Microseconds of one call, the best of several rounds: other processes only ever add."""
    work()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def config(**settings: Any) -> GroupConfig:
    """As the command line would resolve these settings; the environment and files play no part."""
    return resolve(load_settings(EngineArgs, settings, environ={}).args)


def inline_group(**settings: Any) -> InlineGroup:
    return InlineGroup(config(**settings))


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    **params: Any,
) -> Request:
    """One that yields exactly num_tokens tokens. params: more sampling parameters."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=True, **params),
        seed=seed,
        eos_token_ids=(1,),
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
