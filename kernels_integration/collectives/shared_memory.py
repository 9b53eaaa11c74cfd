"""Collectives between CPU ranks in different processes of one node.

An operation: write your part into your buffer, raise your flag, wait for the others' flags, read all parts.
Buffers alternate between two halves. A rank writes into a half again only after it has seen every peer
arrive at the operation in between, hence finished with the one before: one wait per operation is enough.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels_integration.collectives.reduction import sum_in_rank_order
from kernels_integration.collectives.segment import Segment, abort, is_supported, remove
from kernels_integration.errors import CollectiveError

__all__ = ["SharedMemoryCollectives", "abort", "is_supported", "remove"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MAX_CACHED_VIEWS = 256


class SharedMemoryCollectives:
    """Rank `rank` of a set of `size` processes (or threads) of one node; joining waits for all of them.

    `name` is unique on the node and equal on all ranks. Larger tensors than `buffer_bytes` (rank 0's counts)
    travel in pieces; 2 * size * buffer_bytes of /dev/shm are taken. A peer that dies or closes is noticed in
    milliseconds by those that wait for it; one that lives but does not arrive, after `timeout_s`. Either
    breaks the set for good. A waiting rank yields its core and, after 20 ms, sleeps.
    Errors: CollectiveError, ConfigError where unsupported (`is_supported`).
    """

    def __init__(
        self, name: str, rank: int, size: int, *, timeout_s: float = 60.0, buffer_bytes: int = 1 << 18
    ) -> None:
        assert buffer_bytes % 64 == 0, "buffers start on cache lines"
        self._segment: Segment | None = Segment(name, rank, size, buffer_bytes, timeout_s)
        self._rank = rank
        self._size = size
        self._buffer_bytes = self._segment.buffer_bytes
        self._sequence = 1
        with torch.inference_mode(False):  # its views are used in and out of inference mode
            memory = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        buffers = memory[self._segment.buffers_start :]
        self._buffers: Tensor | None = buffers.view(2, size, self._buffer_bytes)
        self._views: dict[tuple[torch.dtype, int], tuple[tuple[Tensor, list[Tensor]], ...]] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        flat = x.view(-1)
        step = self._buffer_bytes // flat.itemsize
        for start in range(0, flat.shape[0], step):
            piece = flat[start : start + step]
            sum_in_rank_order(self._exchange(piece, operation=0)[1], out=piece)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        step = self._buffer_bytes // flat.itemsize
        if flat.shape[0] <= step:
            return self._exchange(flat, operation=1)[0].clone().view(self._size, *x.shape)
        gathered = flat.new_empty(self._size, flat.shape[0])
        for start in range(0, flat.shape[0], step):
            piece = flat[start : start + step]
            gathered[:, start : start + step] = self._exchange(piece, operation=1)[0]
        return gathered.view(self._size, *x.shape)

    def all_to_all(self, x: Tensor) -> Tensor:
        entries = x.reshape(self._size, -1)
        received = entries.new_empty(entries.shape)
        for start, parts in self._exchange_entries(entries, operation=2):
            for peer, part in enumerate(parts):
                received[peer, start : start + part.shape[0]] = part
        return received.view(x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        entries = x.reshape(self._size, -1)
        total = entries.new_empty(entries.shape[1])
        for start, parts in self._exchange_entries(entries, operation=3):
            sum_in_rank_order(parts, out=total[start : start + parts[0].shape[0]])
        return total.view(x.shape[1:])

    def _exchange_entries(self, entries: Tensor, operation: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Piece by piece (first column, each rank's entry for this one) of entries [size, n].

        Read in place: the others' entries are not copied. Valid until the next piece.
        """
        step = self._buffer_bytes // (entries.itemsize * self._size)
        for start in range(0, entries.shape[1], step):
            piece = entries[:, start : start + step]
            width = piece.shape[1]
            parts = self._exchange(piece.reshape(-1), operation)[1]
            yield start, [part[self._rank * width : (self._rank + 1) * width] for part in parts]

    def abort(self) -> None:
        """Fail every rank's present and later operations; any thread may call it."""
        if self._segment is not None:
            self._segment.abort()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = self._buffers = None
        self._views.clear()

    def _exchange(self, piece: Tensor, operation: int) -> tuple[Tensor, list[Tensor]]:
        """All ranks' pieces as one tensor [size, n] and one by one; valid until this rank's next exchange."""
        segment = self._segment
        if segment is None:
            raise CollectiveError(f"rank {self._rank} has closed its collectives; join a new set")
        key = (piece.dtype, piece.shape[0])
        views = self._views.get(key) or self._make_views(*key)
        self._sequence = sequence = self._sequence + 1
        gathered, parts = views[sequence & 1]
        parts[self._rank].copy_(piece)
        call = (key[1] << 8) + (_DTYPE_CODES[key[0]] << 2) + operation
        segment.arrive(sequence, call)
        segment.wait(sequence, call)
        return gathered, parts

    def _make_views(self, dtype: torch.dtype, length: int) -> tuple[tuple[Tensor, list[Tensor]], ...]:
        assert self._buffers is not None, "checked by _exchange"
        if dtype not in _DTYPE_CODES:
            raise CollectiveError(f"shared memory carries no {dtype}; use one of {list(_DTYPES)}")
        if len(self._views) >= _MAX_CACHED_VIEWS:
            self._views.clear()
        with torch.inference_mode(False):
            halves = self._buffers[..., : length * dtype.itemsize].view(dtype)  # [2, size, length]
            views = tuple((half, list(half.unbind())) for half in halves.unbind())
        self._views[dtype, length] = views
        return views
