"""The same kernel tests on a GPU and, where there is none, on the CPU in Triton's interpreter.

What the interpreter cannot do, or takes minutes for, carries the marker `gpu`.
"""

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if HAS_GPU else "cpu")
