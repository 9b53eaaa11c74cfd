"""Joined weights are those of torch.cat, and no program of torch's is imported for their sizes."""

import subprocess
import sys

import pytest
import torch

from actors.model.joined import joined
from cluster.config import BUNDLED_CHECKPOINT

MEASURE = f"""
import sys
from cluster.report.inspection import inspect_checkpoint
found = inspect_checkpoint({str(BUNDLED_CHECKPOINT)!r}, tensor_parallel_size=2)
assert found.shard is not None and found.problems == []
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch_joins(dim: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(3, 5, 2).to(dtype).narrow(dim, 0, n) for n in (1, 0, 2)]
    assert torch.equal(joined(parts, dim), torch.cat(parts, dim))
    assert joined([part.to("meta") for part in parts], dim).shape == torch.cat(parts, dim).shape


def test_a_shard_is_measured_without_torchs_compiler() -> None:
    """Its import takes seconds, and makes a folder in the temporary one."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
