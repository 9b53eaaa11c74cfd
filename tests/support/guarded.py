"""Tensors with sentinels before and behind them, which a kernel that strays overwrites or reads."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

_GUARD = 64


class Guarded:
    """tensor: a contiguous view inside a larger buffer whose ends hold NaN (integers: a large odd number).

    A stray read of an input turns the result into NaN or an impossible index; `check` finds stray writes.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Poisoned throughout: what a kernel leaves unwritten shows."""
        self.poison = (
            float("nan") if dtype.is_floating_point else (0xA5 if dtype == torch.uint8 else 123456789)
        )
        # Rows of the guard are as wide as the tensor's, so that strides keep their alignment.
        width = 1
        for extent in shape[1:]:
            width *= extent
        self._buffer = torch.full(
            (_GUARD * width * 2 + shape[0] * width,), self.poison, dtype=dtype, device=device
        )
        self._start, self._end = _GUARD * width, _GUARD * width + shape[0] * width
        self.tensor = self._buffer[self._start : self._end].view(*shape)

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Self:
        guarded = cls(values.shape, values.dtype, device)
        guarded.tensor.copy_(values)
        return guarded

    def is_poison(self, values: Tensor) -> Tensor:
        return values.isnan() if values.dtype.is_floating_point else values == self.poison

    def check(self) -> None:
        assert bool(self.is_poison(self._buffer[: self._start]).all()), "a write before the tensor"
        assert bool(self.is_poison(self._buffer[self._end :]).all()), "a write behind the tensor"


def largest_row_error(actual: Tensor, expected: Tensor) -> float:
    """max over rows of |actual - expected| / |expected|; infinite where a value is not finite."""
    actual = actual.double().cpu().reshape(actual.shape[0], -1)
    expected = expected.double().cpu().reshape(expected.shape[0], -1)
    if not actual.numel():
        return 0.0
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    return float(error.nan_to_num(torch.inf, torch.inf, torch.inf).max())
