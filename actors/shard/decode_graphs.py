"""Decode steps as CUDA graphs: captured once for each shape, then one launch a step.

A shape's first step runs eagerly, since kernels are compiled when they first run; its second is captured
and, like all that follow, replayed. Graphs share one pool of memory: what a replay leaves is read before the
next.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.shard.device_layout import DecodeShape
from actors.shard.device_passes import DevicePasses, Passed

MAX_GRAPHS = 64
"""Shapes that come later run eagerly."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    places: Tensor
    passed: Passed
    """Where every replay leaves its results."""


class DecodeGraphs:
    """`DevicePasses.run` of steps without chunks and rules. For a backend whose passes can be captured."""

    def __init__(self, passes: DevicePasses) -> None:
        self._passes = passes
        self._seen: set[DecodeShape] = set()
        self._captured: dict[DecodeShape, _Captured] = {}
        self._is_on = True

    def run(self, shape: DecodeShape, places: Tensor) -> Passed:
        """Arguments as for `DevicePasses.run`. The result holds until the next call."""
        captured = self._captured.get(shape)
        if captured is None and self._may_capture(shape):
            captured = self._capture(shape, places)
        if captured is None:
            self._seen.add(shape)
            return self._passes.run(shape, places)
        captured.places.copy_(places)
        captured.graph.replay()
        return captured.passed

    def _may_capture(self, shape: DecodeShape) -> bool:
        is_known = shape.num_places > 0 and shape in self._seen
        return self._is_on and is_known and len(self._captured) < MAX_GRAPHS

    def _capture(self, shape: DecodeShape, places: Tensor) -> _Captured | None:
        """None where it fails: then nothing is captured any more. Capturing computes nothing."""
        own = places.clone()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._captured.values())).graph.pool() if self._captured else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                passed = self._passes.run(shape, own)
        except RuntimeError as error:
            self._is_on = False
            _log.warning("decode steps run without CUDA graphs: capturing %s failed: %s", shape, error)
            return None
        captured = _Captured(graph=graph, places=own, passed=passed)
        self._captured[shape] = captured
        return captured
