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
        """The array on the device; nobody waits for it. On a CPU it shares the array's memory."""
        tensor = torch.from_numpy(array)
        if self.device.type != "cuda":
            return tensor if self.device.type == "cpu" else tensor.to(self.device)
        # From pageable memory torch would wait for all that the device has been given before.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def down(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor on the host; waits for the device. On a CPU it shares the tensor's memory."""
        array: NDArray[Any] = tensor.cpu().numpy()
        return array

    def start_down(self, tensor: Tensor) -> "Descent":
        """Begin to copy the tensor, as it is once the device comes to this point. It may be written after."""
        if self.device.type != "cuda":
            return Descent(self, tensor, None)
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        on_host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Descent(self, on_host, event)


@dataclass(frozen=True, slots=True)
class Descent:
    """A tensor on its way to the host."""

    boundary: Boundary
    tensor: Tensor
    event: torch.cuda.Event | None
    """None: it is there, or on a device whose copies are not awaited."""

    @property
    def is_done(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def array(self) -> NDArray[Any]:
        """What has arrived; waits for it."""
        if self.event is not None:
            self.event.synchronize()
        return self.boundary.down(self.tensor)
