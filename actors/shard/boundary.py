"""Between the host, whose NumPy arrays decide what a step's rows are, and the device that computes them.

All that the host decides by is NumPy; all that a pass reads lies on the device. Nothing else crosses.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Boundary:
    """Carries arrays to one device and back."""

    device: torch.device

    def up(self, array: NDArray[Any]) -> Tensor:
        """The array on the device. On a CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def down(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor on the host; waits for the device. On a CPU it shares the tensor's memory."""
        array: NDArray[Any] = tensor.cpu().numpy()
        return array
