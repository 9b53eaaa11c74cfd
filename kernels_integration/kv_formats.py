"""Storage formats of the vectors in a KV cache: plain values, or fp8 with a scale for each tile.

Shape legend: n vectors, W elements of a stored row, tiles of `FP8_TILE` values.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from kernels_integration.kv_layout import FP8, FP8_DS_MLA, FP8_TILE, Fp8Layout, KVLayout

E4M3_MAX = 448.0
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class VectorFormat(Protocol):
    """How vectors of `dim` values become rows of `row_width` elements of `row_dtype`, and back.

    Rows are a function of the values alone: the same vector has the same bytes in every batch. All-zero
    rows are zero vectors, which is what a new cache holds.
    """

    @property
    def dim(self) -> int: ...
    @property
    def row_width(self) -> int: ...
    @property
    def row_dtype(self) -> torch.dtype: ...

    def encode(self, values: Tensor) -> Tensor:
        """[n, W] of values [n, dim] of any floating dtype."""

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, dim] in dtype (float32, or float64) of rows [n, W]."""


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """The values themselves, rounded to nearest in row_dtype."""

    dim: int
    row_dtype: torch.dtype

    @property
    def row_width(self) -> int:
        return self.dim

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.row_dtype)

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """Tiles of e4m3 values under a float32 scale, then values in bfloat16: the bytes of `Fp8Layout`.

    scale = max(largest magnitude of the tile, smallest_max) / 448, but at least the smallest normal float32,
    and rounded up to a power of two if power_of_two. stored = e4m3(value / scale), to nearest even, after
    the value has been rounded to float32. Read back is stored * scale, rounded once to the dtype asked for.

    A tile that holds NaN or an infinity in float32 has the scale NaN and is NaN when read: a fault
    upstream never becomes plausible numbers.
    """

    layout: Fp8Layout
    smallest_max: float = 0.0
    power_of_two: bool = False

    @property
    def dim(self) -> int:
        return self.layout.num_fp8 + self.layout.num_bf16

    @property
    def row_width(self) -> int:
        return self.layout.num_bytes

    @property
    def row_dtype(self) -> torch.dtype:
        return torch.uint8

    def encode(self, values: Tensor) -> Tensor:
        values = values.float()
        rows = torch.zeros(values.shape[0], self.row_width, dtype=torch.uint8, device=values.device)
        stored, scales, tail = self._parts(rows)
        for tile, columns in enumerate(_tiles(self.layout)):
            tile_values = values[:, columns]
            scale = self._scale(tile_values.abs().amax(-1, keepdim=True))
            scales[:, tile : tile + 1] = scale
            stored.view(torch.float8_e4m3fn)[:, columns] = (tile_values / scale).to(torch.float8_e4m3fn)
        tail.copy_(values[:, self.layout.num_fp8 :])
        return rows

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        stored, scales, tail = self._parts(rows)
        values = torch.empty(rows.shape[0], self.dim, dtype=dtype, device=rows.device)
        # e4m3 s eeee mmm lies in float16 as s 0eeee mmm0000000, which is 2^-8 of it: shifting bits is 13
        # times as fast as torch's conversion on a CPU. Under a scale that is not NaN no NaN is stored.
        halves = (stored.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14)).view(torch.float16)
        scales = scales.to(dtype) * 2.0**8
        for tile, columns in enumerate(_tiles(self.layout)):
            torch.mul(halves[:, columns], scales[:, tile : tile + 1], out=values[:, columns])
        values[:, self.layout.num_fp8 :] = tail
        return values

    def _scale(self, largest: Tensor) -> Tensor:
        scale = (largest.clamp_min(self.smallest_max) / E4M3_MAX).clamp_min(SMALLEST_NORMAL)
        if self.power_of_two:
            scale = _next_power_of_two(scale)
        return scale.masked_fill(~largest.isfinite(), torch.nan)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of rows [n, W]: bytes of e4m3 values, scales, bfloat16 values."""
        layout = self.layout
        scales = rows[:, layout.scales_start : layout.bf16_start].view(torch.float32)
        tail = rows[:, layout.bf16_start : layout.bf16_start + 2 * layout.num_bf16].view(torch.bfloat16)
        return rows[:, : layout.num_fp8], scales, tail


@dataclass(frozen=True, slots=True, eq=False)
class StoredVectors:
    """One vector for each slot, in a storage format."""

    storage: Tensor
    """[slots, W]"""
    format: VectorFormat

    @classmethod
    def allocate(cls, num_slots: int, format: VectorFormat, device: torch.device | str = "cpu") -> Self:
        """All zero."""
        shape = (num_slots, format.row_width)
        return cls(torch.zeros(shape, dtype=format.row_dtype, device=device), format)

    @classmethod
    def plain(cls, values: Tensor) -> Self:
        """Over values [slots, dim], not a copy."""
        return cls(values, PlainFormat(values.shape[1], values.dtype))

    @property
    def num_slots(self) -> int:
        return self.storage.shape[0]

    @property
    def dim(self) -> int:
        return self.format.dim

    def gather(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, dim] in dtype, of slots [n] int32 or int64. Only these are read and decoded."""
        return self.format.decode(self.storage.index_select(0, slots), dtype)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store values [n, dim] at slots [n] int64, all different.

        A slot outside raises IndexError and nothing is written (on a GPU: a device-side assertion).
        """
        self.storage.index_copy_(0, slots, self.format.encode(values))


def latent_format(layout: KVLayout) -> VectorFormat:
    """Of [latent | rope]. Scales of fp8_ds_mla are plain float32, as vLLM writes and FlashMLA reads them."""
    if layout.kv_cache_dtype == FP8_DS_MLA:
        return Fp8Format(layout=Fp8Layout(num_fp8=layout.latent_rank, num_bf16=layout.rope_dim))
    return PlainFormat(layout.latent_rank + layout.rope_dim, _DTYPES[layout.kv_cache_dtype])


def key_format(layout: KVLayout) -> VectorFormat:
    """Of indexer keys. Their fp8 scales are powers of two, as DeepSeek-V3.2 is released (ue8m0)."""
    if layout.indexer_kv_dtype == FP8:
        return Fp8Format(layout=Fp8Layout(num_fp8=layout.index_dim), smallest_max=1e-4, power_of_two=True)
    return PlainFormat(layout.index_dim, _DTYPES[layout.indexer_kv_dtype])


def _tiles(layout: Fp8Layout) -> list[slice]:
    return [
        slice(start, min(start + FP8_TILE, layout.num_fp8)) for start in range(0, layout.num_fp8, FP8_TILE)
    ]


def _next_power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below x, exactly; x is positive, normal float32 or NaN or inf."""
    bits = x.view(torch.int32)
    # Any set bit of the mantissa carries into the exponent. NaN would overflow; callers replace it.
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
