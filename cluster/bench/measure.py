"""One side of the comparison each: a group, and transformers' generate."""

import os
import time
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cluster.answering.engine import Engine
from cluster.bench.workload import Workload
from kernels_integration.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A batch that starts together and is answered to its end."""

    batch_size: int
    num_drafts: int | None
    """None: transformers."""
    ttft_s: float
    """Mean time to first token."""
    tokens_per_s: float
    """Output tokens of the whole batch over the whole time, prefill included."""
    tokens_per_verify: float | None = None


def measure_engine(engine: Engine, workload: Workload, batch_size: int, num_drafts: int) -> Measurement:
    """Errors: what a request fails with."""
    requests = workload.requests(batch_size, prefix=f"bench-{time.monotonic_ns()}")
    first_s: dict[str, float] = {}
    num_verifies, num_verified = 0, 0
    start_s = time.perf_counter()
    for request_id, update in engine.run(requests):
        if isinstance(update, Exception):
            raise update
        if request_id not in first_s:
            first_s[request_id] = time.perf_counter() - start_s
        else:
            num_verifies += 1
            num_verified += len(update.token_ids)
    total_s = time.perf_counter() - start_s
    return Measurement(
        batch_size=batch_size,
        num_drafts=num_drafts,
        ttft_s=sum(first_s.values()) / batch_size,
        tokens_per_s=batch_size * workload.output_len / total_s,
        tokens_per_verify=num_verified / max(num_verifies, 1),
    )


class Reference:
    """transformers' model of the same checkpoint: eager attention, its own KV cache.

    It runs with one thread or with all cores, whichever a short trial of the batch finds faster: on
    shared cores, threads that wait for each other can cost more than they bring.

    Errors: ConfigError when transformers is not installed.
    """

    def __init__(self, model_path: str, dtype: str) -> None:
        try:
            torch, transformers = import_module("torch"), import_module("transformers")
        except ImportError:
            raise ConfigError(
                "transformers is not installed; install latentray[test], or pass --no-reference"
            ) from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch: Any = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def measure(self, workload: Workload, batch_size: int) -> Measurement:
        self._generate(workload, batch_size, 2)
        trials = {n: self._trial(workload, batch_size, n) for n in (1, len(os.sched_getaffinity(0)))}
        self._torch.set_num_threads(min(trials, key=lambda n: trials[n]))
        start_s = time.perf_counter()
        self._generate(workload, batch_size, 1)
        ttft_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        self._generate(workload, batch_size, workload.output_len)
        total_s = time.perf_counter() - start_s
        return Measurement(
            batch_size=batch_size,
            num_drafts=None,
            ttft_s=ttft_s,
            tokens_per_s=batch_size * workload.output_len / total_s,
        )

    def _trial(self, workload: Workload, batch_size: int, num_threads: int) -> float:
        """Seconds that a few tokens take."""
        self._torch.set_num_threads(num_threads)
        start_s = time.perf_counter()
        self._generate(workload, batch_size, 12)
        return time.perf_counter() - start_s

    def _generate(self, workload: Workload, batch_size: int, num_tokens: int) -> None:
        ids = self._torch.tensor(workload.prompts[:batch_size])
        answer = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.shape[1] == ids.shape[1] + num_tokens, "the reference stopped early"
