"""Placement: which slice of each tensor a tensor-parallel rank reads, in the dtype it computes with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from actors.model.quantization import SCALE_SUFFIX
from actors.model.safetensors_file import TensorInfo
from kernels_integration.backend import Backend
from kernels_integration.errors import CheckpointError
from kernels_integration.topology import Topology
from kernels_integration.weight import Weight, accumulate_dtype

_COMPARED_ROWS = 256


class TensorSource(Protocol):
    """Where slices come from: a Checkpoint, or a SliceMeter that only counts them."""

    @property
    def block_size(self) -> tuple[int, int]:
        """Rows and columns of an FP8 weight that share a scale."""
        ...

    def __getitem__(self, name: str) -> TensorInfo: ...

    def __contains__(self, name: str) -> bool:
        """Whether it is stored."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Memory without content."""
        ...

    def fills(self, device: torch.device) -> bool:
        """Whether `fill` writes to memory of this device."""
        ...

    def fill(self, name: str, rows: range, columns: range, out: Tensor) -> None:
        """Write a slice into out [rows, columns]. A vector counts as one column.

        FP8 is dequantised unless out is FP8.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReader:
    """Reads the tensors under `prefix` as rank `rank` needs them."""

    checkpoint: TensorSource
    dtype: torch.dtype
    rank: int
    topology: Topology
    device: torch.device | str = "cpu"
    """Where the weights are to lie. What files hold passes through the CPU's memory, a tensor at a time."""
    prefix: str = ""
    is_transposed: bool = False
    """Matrices lie in memory as their transposes."""
    keeps_fp8: bool = False
    """Matrices that are stored in fp8 stay so, where their part is one of whole blocks."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint[self.prefix + name].shape

    def under(self, prefix: str) -> "WeightReader":
        return replace(self, prefix=self.prefix + prefix)

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Replicated: every rank reads all of it."""
        return self.part(name, dtype=dtype)

    def norm(self, name: str) -> Tensor:
        """Whole, in the dtype that norms compute in."""
        return self.part(name, dtype=accumulate_dtype(self.dtype))

    def unsplit(self) -> "WeightReader":
        """A reader whose rows and columns are all of them."""
        return replace(self, rank=0, topology=Topology())

    def laid_out_for(self, backend: Backend) -> "WeightReader":
        """A reader of matrices as the backend keeps them, which then needs no copy."""
        return replace(self, is_transposed=backend.keeps_transposes, keeps_fp8=backend.keeps_fp8)

    def rows(self, *names: str) -> Weight:
        """This rank's part of the output features; of several weights one below the other."""
        return self._weight([(name, self._share(self.shape(name)[0])) for name in names])

    def columns(self, name: str) -> Weight:
        """This rank's part of the input features."""
        return self._weight([(name, slice(None))], self._share(self.shape(name)[1]))

    def expert_rows(self, experts: range, *names: str) -> Weight:
        """[E, out, in]: `rows` of experts.E.NAME, expert after expert in one tensor."""
        of_one = self.under("experts.0.")
        parts = [(name, self._share(of_one.shape(name)[0])) for name in names]
        return self._weight(parts, experts=experts)

    def expert_columns(self, experts: range, name: str) -> Weight:
        """[E, out, in]: `columns` of experts.E.NAME, expert after expert in one tensor."""
        width = self.under("experts.0.").shape(name)[1]
        return self._weight([(name, slice(None))], self._share(width), experts=experts)

    def head_rows(self, name: str, num_heads: int) -> Tensor:
        """The output features of this rank's ceil(num_heads / tp) heads; heads past the last are zero."""
        return self.part(name, rows=self._heads(self.shape(name)[0], num_heads))

    def head_columns(self, name: str, num_heads: int) -> Weight:
        """The same of the input features."""
        return self._weight([(name, slice(None))], self._heads(self.shape(name)[1], num_heads))

    def vocabulary(self, name: str) -> Tensor:
        """This rank's ceil(V / tp) rows; rows past the vocabulary are zero."""
        return self.head_rows(name, self.shape(name)[0])

    def part(
        self,
        name: str,
        *,
        rows: slice = slice(None),
        columns: slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Any part of a tensor. Where a slice ends past the tensor, the rest of the part is zero."""
        return self._stack([(name, rows)], columns, dtype)

    def _stack(
        self,
        parts: Sequence[tuple[str, slice]],
        columns: slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Rows of several tensors below each other; read in place, as copies would leave holes in memory."""
        height, width = self._extents(parts, columns)
        out = self._allocate((height, width), dtype or self.dtype)
        self._fill_stack(parts, columns, out)
        return out if len(self.shape(parts[0][0])) > 1 else out[:, 0]

    def _weight(
        self,
        parts: Sequence[tuple[str, slice]],
        columns: slice = slice(None),
        *,
        experts: range | None = None,
    ) -> Weight:
        """`_stack` as a weight, or one for each expert in a tensor; fp8 with its scales where that can be."""
        one = self if experts is None else self.under("experts.0.")
        readers = [self] if experts is None else [self.under(f"experts.{e}.") for e in experts]

        def stacked(of: Sequence[tuple[str, slice]], columns: slice, reader: WeightReader) -> Tensor:
            """In the reader's dtype and layout."""
            extents = reader._extents(of, columns)
            out = reader._allocate(extents if experts is None else (len(experts), *extents), reader.dtype)
            for matrix, into in zip(readers, [out] if experts is None else out, strict=True):
                replace(reader, prefix=matrix.prefix)._fill_stack(of, columns, into)
            return out

        if not (self.keeps_fp8 and all(reader._is_of_blocks(parts, columns) for reader in readers)):
            return Weight(stacked(parts, columns, one))
        block_rows, block_columns = block_size = self.checkpoint.block_size
        blocks = [(f"{name}{SCALE_SUFFIX}", _blocks(rows, block_rows)) for name, rows in parts]
        of_scales = replace(one, dtype=torch.float32, is_transposed=False)
        return Weight(
            stacked(parts, columns, replace(one, dtype=torch.float8_e4m3fn)),
            stacked(blocks, _blocks(columns, block_columns), of_scales),
            block_size,
        )

    def _is_of_blocks(self, parts: Sequence[tuple[str, slice]], columns: slice) -> bool:
        """Whether all parts are stored in fp8, and begin and end where blocks do, one below the other."""
        block_rows, block_columns = self.checkpoint.block_size
        for index, (name, rows) in enumerate(parts):
            height, width = self.shape(name)
            is_last = index == len(parts) - 1
            if f"{self.prefix}{name}{SCALE_SUFFIX}" not in self.checkpoint:
                return False
            if not (_is_of_blocks(rows, height, block_rows) and _is_of_blocks(columns, width, block_columns)):
                return False
            if not is_last and _extent(rows, height) % block_rows:
                return False
        return True

    def _extents(self, parts: Sequence[tuple[str, slice]], columns: slice) -> tuple[int, int]:
        shape = self.shape(parts[0][0])
        height = sum(_extent(rows, self.shape(name)[0]) for name, rows in parts)
        return height, _extent(columns, shape[1] if len(shape) > 1 else 1)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self.is_transposed:
            return self.checkpoint.allocate(shape, dtype, self.device)
        *experts, height, width = shape
        return self.checkpoint.allocate((*experts, width, height), dtype, self.device).transpose(-1, -2)

    def _fill_stack(self, parts: Sequence[tuple[str, slice]], columns: slice, out: Tensor) -> None:
        start = 0
        for name, rows in parts:
            height = _extent(rows, self.shape(name)[0])
            self._fill(name, rows, columns, out[start : start + height])
            start += height

    def _fill(self, name: str, rows: slice, columns: slice, out: Tensor) -> None:
        shape = self.shape(name)
        row_range = range(*rows.indices(shape[0]))
        column_range = range(*columns.indices(shape[1] if len(shape) > 1 else 1))
        stored = out[: len(row_range), : len(column_range)]
        if stored.shape != out.shape:
            out.zero_()
        in_place = self.checkpoint.fills(stored.device)
        if in_place and (len(column_range) == out.shape[1] or self.is_transposed):
            self.checkpoint.fill(self.prefix + name, row_range, column_range, stored)
        else:  # a part of the columns of a row-major matrix, or another device
            data = torch.empty_like(stored, device=None if in_place else "cpu")
            self.checkpoint.fill(self.prefix + name, row_range, column_range, data)
            stored.copy_(data)

    def require_copy(self, copy: str, original: str) -> None:
        """Compare this rank's vocabulary rows of two tensors of one shape, in the dtype of the model.

        Errors: CheckpointError naming both when they differ.
        """
        height = self.shape(copy)[0]
        share = self._heads(height, height)
        end = min(share.stop, height)
        for start in range(share.start, end, _COMPARED_ROWS):
            rows = slice(start, min(start + _COMPARED_ROWS, end))
            ours, theirs = (self.part(name, rows=rows) for name in (copy, original))
            if not ours.is_meta and not torch.equal(ours, theirs):
                raise CheckpointError(
                    f"tensor {self.prefix}{copy} differs from {self.prefix}{original} (rows {rows.start} to "
                    f"{rows.stop - 1}); this model has one of them, so they must be equal. Remove the copy "
                    "from the checkpoint to use the other for both (an MTP layer's copies are looked at only "
                    "to draft: --num-speculative-tokens 0 serves the model without)"
                )

    def _heads(self, width: int, num_heads: int) -> slice:
        """Every rank has equally many heads: the last ones' may lie past the tensor."""
        heads, head_width = self.topology.heads(num_heads, self.rank), width // num_heads
        return slice(heads.start * head_width, heads.stop * head_width)

    def _share(self, width: int) -> slice:
        columns = self.topology.columns(width, self.rank)
        return slice(columns.start, columns.stop)


def _is_of_blocks(part: slice, size: int, block: int) -> bool:
    start, stop = part.start or 0, size if part.stop is None else part.stop
    return start % block == 0 and stop <= size and (stop % block == 0 or stop == size)


def _blocks(part: slice, block: int) -> slice:
    """The blocks of a part that is one of whole blocks, or of all."""
    if part.stop is None:
        return slice(None)
    return slice((part.start or 0) // block, -(-part.stop // block))


def _extent(part: slice, size: int) -> int:
    return size if part.stop is None else part.stop - (part.start or 0)
