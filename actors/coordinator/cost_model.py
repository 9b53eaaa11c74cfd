"""What a step costs, measured while running: medians of what was seen, a line through them for the rest."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SAMPLES_PER_CELL = 31
"""A median of so many step times moves by 3 % when single ones move by 10 %."""
_REFIT_EVERY = 8
"""Samples between two fits of the line."""
_SPEED_RATE = 0.1
_MAX_SURPRISE = 0.05
"""One step tells of no larger relative change of speed: so the speed follows medians too, not outliers."""
_USUAL_STEPS_PER_SAMPLE = 4
"""A full cell that runs all the time moves this much slower than the speed: it is what others compare to."""
_PRIOR = np.array([1.0, 0.2, 0.1, 0.01])
"""Before anything is known, in units of a step's typical time: its base, its first draft, each further
draft, and each row of the target."""
_PRIOR_WEIGHT = 0.003
_LEAST = 0.01
"""Of the prior: nothing is free."""


@dataclass(slots=True)
class _Cell:
    """Steps of about one batch size with one greatest k."""

    num_verifies: int
    """Of the first sample; the others are brought to it and to full k by the line."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_PER_CELL))
    median: float = 0.0


class CostModel:
    """Predicts the seconds of a step without chunks from its verifies, greatest k and drafts.

    The times of like steps fall into cells: batch sizes within about 20 %, and the greatest k. A cell's
    median is robust to single slow steps. What no cell holds comes from the nearest one, by the ratio of
    a line (base + first draft + each further draft + each row) fitted through all medians.
    A machine that slows down as a whole, or contexts that grow, change `speed` alone: so a cell that was
    not measured for a while stays comparable with the present one.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self._max_drafts = num_speculative_tokens
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._line = _PRIOR.copy()
        self._speed = 1.0
        self._num_samples = 0

    def observe(
        self, num_verifies: int, k: int, num_drafts: int, seconds: float, *, is_usual: bool = True
    ) -> None:
        """A step with these verifies, greatest k and drafts took so long.

        is_usual: it is the kind of step that runs most; its time also tells the machine's speed.
        """
        bucket = batch_bucket(num_verifies)
        cell = self._cells.get((bucket, k))
        if cell is None:
            cell = self._cells[bucket, k] = _Cell(num_verifies)
        elif is_usual:
            surprise = math.log(seconds / self.predict(num_verifies, k, num_drafts))
            self._speed *= math.exp(_SPEED_RATE * min(max(surprise, -_MAX_SURPRISE), _MAX_SURPRISE))
        self._num_samples += 1
        is_full = len(cell.seconds) == SAMPLES_PER_CELL
        if not (is_usual and is_full and self._num_samples % _USUAL_STEPS_PER_SAMPLE):
            like = self._on_line(cell.num_verifies, k, cell.num_verifies * k)
            like /= self._on_line(num_verifies, k, num_drafts)
            cell.seconds.append(seconds / self._speed * like)
            cell.median = sorted(cell.seconds)[len(cell.seconds) // 2]
        if self._num_samples % _REFIT_EVERY == 0 or len(cell.seconds) == 1:
            self._fit()

    def is_measured(self, num_verifies: int, k: int) -> bool:
        return (batch_bucket(num_verifies), k) in self._cells

    def predict(self, num_verifies: int, k: int, num_drafts: int) -> float:
        """Seconds. 1 before the first observation: only ratios mean something then."""
        expected = self._speed * self._on_line(num_verifies, k, num_drafts)
        if not self._cells:
            return expected
        bucket = batch_bucket(num_verifies)
        key = (bucket, k)
        if key not in self._cells:
            key = min(self._cells, key=lambda other: (abs(other[0] - bucket), abs(other[1] - k)))
        cell = self._cells[key]
        return expected * cell.median / self._on_line(cell.num_verifies, key[1], cell.num_verifies * key[1])

    def seconds_per_draft(self) -> float:
        """What one row more costs a step."""
        return float(self._speed * self._line[3])

    def _on_line(self, num_verifies: int, k: int, num_drafts: int) -> float:
        base, first, further, row = self._line.tolist()
        return float(base + first * (k > 0) + further * max(k - 1, 0) + row * (num_verifies + num_drafts))

    def _fit(self) -> None:
        """Least squares of the relative error, drawn to the prior's proportions where cells do not tell."""
        cells = [(key[1], cell) for key, cell in self._cells.items()]
        medians = np.array([cell.median for _, cell in cells])
        features = np.array([_features(cell.num_verifies, k) for k, cell in cells]) / medians[:, None]
        of_prior = np.array([_features(cell.num_verifies, k) for k, cell in cells]) @ _PRIOR
        prior = _PRIOR * float(np.median(medians / of_prior))
        scaled = features * prior  # the unknowns are multiples of the prior
        weights = np.array([len(cell.seconds) for _, cell in cells]) / SAMPLES_PER_CELL
        normal = scaled.T @ (scaled * weights[:, None]) + _PRIOR_WEIGHT * np.eye(4)
        target = scaled.T @ weights + _PRIOR_WEIGHT
        self._line = prior * np.maximum(np.linalg.solve(normal, target), _LEAST)


def _features(num_verifies: int, k: int) -> Sequence[float]:
    return (1.0, float(k > 0), max(k - 1.0, 0.0), num_verifies * (k + 1.0))


def batch_bucket(num_verifies: int) -> int:
    """Those of one bucket differ by less than a factor of sqrt(2): 1, 2, 3, 4-5, 6-7, 8-10, 11-14, ..."""
    return round(2 * math.log2(num_verifies) - 0.25) if num_verifies > 1 else 0
