"""Compiled kernels of a CPU process: their number is bounded, and so is what they take."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from pathlib import Path
import torch
from kernels_integration.reference import linear
from kernels_integration.reference.linear import MatrixProduct
linear.ONEDNN_MIN_PRODUCTS = 1 << 20  # whoever made the processor
torch.set_num_threads(1)
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
product = MatrixProduct(torch.ones(512, 256))
product(torch.ones(1000, 256))
before = resident_bytes()
for num_rows in range(8, 968):
    product(torch.ones(num_rows, 256))
print(resident_bytes() - before)
"""


def growth_bytes(**variables: str) -> int:
    """Of a process that computes products of 960 sizes."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_new_sizes_of_steps_do_not_grow_a_process_for_ever() -> None:
    unbounded = growth_bytes(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    bounded = growth_bytes()
    # Where torch has no oneDNN nothing is kept, with or without a bound.
    assert bounded < max(0.85 * unbounded, 30e6), f"{unbounded} without a bound"
