"""What a step costs the coordinator: choosing it, encoding its message, committing its report.

    python -m benchmarks.scheduler [--requests 1 64 512] [--drafts 3] [--steps 200]

Every request decodes; two of three drafts are right. The report is made up outside the clock.
"""

import gc
import statistics
import time

import numpy as np

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.messages import RowKind, StepInput, StepOutput, decode_output, encode
from actors.requests import Request
from actors.sampling_params import SamplingParams
from benchmarks import harness

PROMPT_LEN = 100


def coordinator_with(num_requests: int, num_drafts: int, num_steps: int) -> Coordinator:
    """A coordinator whose requests outlast the measurement."""
    max_model_len = PROMPT_LEN + (num_steps + 20) * (num_drafts + 1)
    config = GroupConfig(
        model_path="",
        served_model_name="none",
        num_speculative_tokens=num_drafts,
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT_LEN,
        block_size=64,
        num_kv_blocks=num_requests * (max_model_len // 64 + 1),
        dtype="float32",
        kv_cache_dtype="float32",
    )
    coordinator = Coordinator(config)
    for i in range(num_requests):
        coordinator.submit(
            Request(
                request_id=f"request-{i}",
                prompt_token_ids=tuple(range(PROMPT_LEN)),
                params=SamplingParams(max_tokens=None),
                seed=i,
                eos_token_ids=(1,),
            )
        )
    return coordinator


def made_up_report(step: StepInput) -> bytes:
    """Two thirds of the drafts are right."""
    drafts: list[int] = []
    tokens: list[int] = []
    lengths: list[int] = []
    indptr = step.ids_indptr.tolist()
    rows = zip(step.kind.tolist(), step.k.tolist(), step.start.tolist(), strict=True)
    for i, (kind, k, start) in enumerate(rows):
        if kind == RowKind.VERIFY:
            accepted = (i + step.step) % (k + 1)
            drafts += [7] * k
            tokens += [7] * accepted + [8] * (k + 1 - accepted)
            lengths.append(start + accepted + 1)
        else:
            tokens += [7] * (kind == RowKind.FINAL_CHUNK)
            lengths.append(start + indptr[i + 1] - indptr[i])
    return encode(
        StepOutput(
            epoch=step.epoch,
            step=step.step,
            drafts=np.array(drafts, np.int32),
            tokens=np.array(tokens, np.int32),
            length=np.array(lengths, np.int32),
        )
    )


def measure(num_requests: int, num_drafts: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds per step and part, and the message's bytes per request."""
    coordinator = coordinator_with(num_requests, num_drafts, num_steps)
    times: dict[str, list[float]] = {"schedule": [], "encode": [], "decode": [], "process": [], "updates": []}
    size = 0
    for n in range(num_steps + 3):
        gc.disable()
        t0 = time.perf_counter()
        step = coordinator.schedule()
        t1 = time.perf_counter()
        assert step is not None
        message = encode(step)
        t2 = time.perf_counter()
        report = made_up_report(step)
        t3 = time.perf_counter()
        output = decode_output(report)
        t4 = time.perf_counter()
        coordinator.process(output)
        t5 = time.perf_counter()
        coordinator.take_updates()
        t6 = time.perf_counter()
        gc.enable()
        if n >= 3:  # prompts and first verifies
            size = len(message)
            for part, seconds in zip(times, (t1 - t0, t2 - t1, t4 - t3, t5 - t4, t6 - t5), strict=True):
                times[part].append(seconds)
    result = {part: statistics.median(values) * 1e3 for part, values in times.items()}
    return result | {"total": sum(result.values()), "bytes per request": size / num_requests}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(harness.machine())
    print("milliseconds per step (median)")
    for num_requests in args.requests:
        parts = measure(num_requests, args.drafts, args.steps)
        print(
            f"{num_requests:5d} requests: "
            + ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
        )


if __name__ == "__main__":
    main()
