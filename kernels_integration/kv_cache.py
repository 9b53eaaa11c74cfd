"""The paged cache of one rank: latent KV and indexer keys, token by token, per layer.

A slot holds one token; a block is `block_size` consecutive slots. Which token lives in which slot is the
coordinator's choice (block tables), so nothing here knows of requests.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch

from kernels_integration.kv_formats import StoredVectors, key_format, latent_format
from kernels_integration.kv_layout import KVLayout


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
