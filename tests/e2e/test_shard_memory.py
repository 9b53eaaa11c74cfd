"""A shard grows by what start-up says, at most, and then stays, whatever shapes its steps have."""

import subprocess
import sys

import pytest

from cluster.report.memory import KERNEL_BYTES
from tests.support.cli_process import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = """
import os, random, sys
from pathlib import Path
from kernels_integration.reference import linear
linear.ONEDNN_MIN_PRODUCTS = 1 << 20  # whoever made the processor: kernels are compiled for each size
from actors.sampling_params import SamplingParams
from cluster.llm import LLM

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

rng = random.Random(1)
with LLM(
    executor="inline", attention_backend=sys.argv[1], kv_cache_memory_bytes="16M", max_num_seqs=32,
    max_num_batched_tokens=256,
) as llm:
    found = [resident_bytes()]
    for _ in range(3):
        for number in (1, 2, 3, 5, 8, 13):
            prompts = [
                {"prompt_token_ids": [rng.randrange(8, 260) for _ in range(rng.randrange(1, 200))]}
                for _ in range(number)
            ]
            llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        found.append(resident_bytes())
print(*found)
"""


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_growth_is_bounded(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    loaded, *after = map(int, done.stdout.split())
    step = 64 * 2**20  # intermediate results of 256 rows, and what the allocator keeps of them
    kernels = KERNEL_BYTES if backend == "torch" else 0
    assert max(after) - loaded < kernels + step, (loaded, after)
    assert after[-1] - after[-2] < step / 2, (loaded, after)
