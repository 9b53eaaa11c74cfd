"""The paged cache of one rank: latent KV and indexer keys, token by token, per layer.

A slot holds one token; a block is `block_size` consecutive slots. Which token lives in which slot is the
coordinator's choice (block tables), so nothing here knows of requests.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels_integration.rows import RowBatch


def bytes_per_token(num_layers: int, latent_dim: int, index_dim: int | None, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the cache of the rank that owns it."""
    return num_layers * (latent_dim + (index_dim or 0)) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCache:
    """Storage of `num_slots` tokens in every layer; layers of the MTP module count too."""

    latents: tuple[Tensor, ...]
    """Per layer [slots, C+R]: the normed latent c, then the rotated rope part."""
    keys: tuple[Tensor, ...]
    """Per layer [slots, D]: the rotated indexer key; [0, D] in a layer that reuses another's selection.

    Empty for a model without an indexer."""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_slots: int,
        latent_dim: int,
        index_dim: int | None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        index_layers: Collection[int] | None = None,
    ) -> Self:
        """An empty cache. `latent_dim` is C+R; `index_dim` is None without an indexer.

        `index_layers` are the layers that run an indexer, None: all; the others keep no keys.
        """

        # Zeros: slots that no token has taken yet are read where requests of unequal length share a padded
        # gather; their weight there is 0, and 0 * NaN would be NaN.
        def storage(slots: int, dim: int) -> Tensor:
            return torch.zeros(slots, dim, dtype=dtype, device=device)

        latents = tuple(storage(num_slots, latent_dim) for _ in range(num_layers))
        if index_dim is None:
            return cls(latents=latents, keys=())
        with_keys = range(num_layers) if index_layers is None else index_layers
        keys = (storage(num_slots if layer in with_keys else 0, index_dim) for layer in range(num_layers))
        return cls(latents=latents, keys=tuple(keys))

    @property
    def num_layers(self) -> int:
        return len(self.latents)

    @property
    def num_slots(self) -> int:
        return self.latents[0].shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in (*self.latents, *self.keys))

    def latent(self, layer: int) -> Tensor:
        """[slots, C+R]"""
        return self.latents[layer]

    def index_keys(self, layer: int) -> Tensor:
        """[slots, D]"""
        return self.keys[layer]

    def write(self, layer: int, rows: RowBatch, latent: Tensor, index_key: Tensor | None) -> None:
        """Store the rows that this rank owns, in the cache's dtype.

        `latent` [T, C+R] and `index_key` [T, D] hold every row of the batch; None: this layer has no indexer.
        A slot outside the cache raises IndexError (on a GPU: a device-side assertion).
        """
        if rows.write_rows.shape[0] == 0:
            return
        _write(self.latents[layer], rows, latent)
        if index_key is not None:
            _write(self.keys[layer], rows, index_key)


def _write(storage: Tensor, rows: RowBatch, values: Tensor) -> None:
    # write_rows ascend, so as many of them as rows are all rows, in order.
    if rows.write_rows.shape[0] != rows.num_rows:
        values = values.index_select(0, rows.write_rows)
    storage.index_copy_(0, rows.write_slots, values.to(storage.dtype))
