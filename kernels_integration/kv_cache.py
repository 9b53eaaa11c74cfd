"""The paged cache of one rank: latent KV and indexer keys, token by token, per layer.

A slot holds one token; a block is `block_size` consecutive slots. Which token lives in which slot is the
coordinator's choice (block tables), so nothing here knows of requests.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors, key_format, latent_format
from kernels_integration.kv_layout import KVLayout
from kernels_integration.rows import RowBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCache:
    """Storage of `num_slots` tokens in every layer; layers of the MTP module count too."""

    latents: tuple[StoredVectors, ...]
    """Per layer, C+R values a slot: the normed latent c, then the rotated rope part."""
    keys: tuple[StoredVectors, ...]
    """Per layer, D values a slot: the rotated indexer key; no slots where another's selection is reused.

    Empty for a model without an indexer."""

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        num_layers: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        index_layers: Collection[int] | None = None,
    ) -> Self:
        """An empty cache; num_slots * layout.bytes_per_token(...) bytes.

        `index_layers` are the layers that run an indexer, None: all; the others keep no keys.
        """
        # Zeros: slots that no token has taken yet are read where requests of unequal length share a padded
        # gather; their weight there is 0, and 0 * NaN would be NaN.
        latents, keys = latent_format(layout), key_format(layout)
        with_keys = range(num_layers) if index_layers is None else index_layers
        return cls(
            latents=tuple(StoredVectors.allocate(num_slots, latents, device) for _ in range(num_layers)),
            keys=tuple(
                StoredVectors.allocate(num_slots if layer in with_keys else 0, keys, device)
                for layer in range(num_layers if layout.index_dim else 0)
            ),
        )

    @property
    def num_layers(self) -> int:
        return len(self.latents)

    @property
    def num_slots(self) -> int:
        return self.latents[0].num_slots

    @property
    def num_bytes(self) -> int:
        return sum(vectors.storage.nbytes for vectors in (*self.latents, *self.keys))

    def latent(self, layer: int) -> StoredVectors:
        return self.latents[layer]

    def index_keys(self, layer: int) -> StoredVectors:
        return self.keys[layer]

    def write(self, layer: int, rows: RowBatch, latent: Tensor, index_key: Tensor | None) -> None:
        """Store the rows that this rank owns, in the cache's formats.

        `latent` [T, C+R] and `index_key` [T, D] hold every row of the batch; None: this layer has no indexer.
        A slot outside the cache raises IndexError (on a GPU: a device-side assertion).
        """
        if rows.write_rows.shape[0] == 0:
            return
        _write(self.latents[layer], rows, latent)
        if index_key is not None:
            _write(self.keys[layer], rows, index_key)


def _write(vectors: StoredVectors, rows: RowBatch, values: Tensor) -> None:
    # write_rows ascend, so as many of them as rows are all rows, in order.
    if rows.write_rows.shape[0] != rows.num_rows:
        values = values.index_select(0, rows.write_rows)
    vectors.write(rows.write_slots, values)
