"""How the KV cache keeps a token, in bytes: the arithmetic behind budgets, reports and storage.

Without torch, so that settings are checked and reported without loading it.
Shape legend: C latent rank, R rope part, D indexer key dims.
"""

from dataclasses import dataclass

PLAIN_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
FP8_DS_MLA = "fp8_ds_mla"
FP8 = "fp8"
KV_CACHE_DTYPES = (*PLAIN_ITEM_BYTES, FP8_DS_MLA)
INDEXER_KV_DTYPES = (*PLAIN_ITEM_BYTES, FP8)
FP8_TILE = 128
"""Values that share a scale; the last tile of a vector may be shorter."""

_SCALE_ALIGNMENT, _VECTOR_ALIGNMENT = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Layout:
    """The bytes of one vector: e4m3 values, the float32 scale of each tile, then bfloat16 values.

    Scales begin at a multiple of 4 bytes, each vector at one of 16, which is what a GPU reads at once; what
    lies between is zero. All little-endian. 512 + 64 values take 656 bytes, vLLM's and FlashMLA's fp8_ds_mla;
    128 + 0 take 144.
    """

    num_fp8: int
    num_bf16: int = 0

    @property
    def num_tiles(self) -> int:
        return -(-self.num_fp8 // FP8_TILE)

    @property
    def scales_start(self) -> int:
        return _aligned(self.num_fp8, _SCALE_ALIGNMENT)

    @property
    def bf16_start(self) -> int:
        return self.scales_start + 4 * self.num_tiles

    @property
    def num_bytes(self) -> int:
        return _aligned(self.bf16_start + 2 * self.num_bf16, _VECTOR_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The formats of a cache and the widths of what it keeps, as in the model's config."""

    kv_cache_dtype: str
    """One of KV_CACHE_DTYPES."""
    indexer_kv_dtype: str
    """One of INDEXER_KV_DTYPES."""
    latent_rank: int
    """C"""
    rope_dim: int
    """R"""
    index_dim: int
    """D; 0 for a model without an indexer."""

    @property
    def latent_bytes(self) -> int:
        """Of one token in one layer."""
        if self.kv_cache_dtype == FP8_DS_MLA:
            return Fp8Layout(num_fp8=self.latent_rank, num_bf16=self.rope_dim).num_bytes
        return (self.latent_rank + self.rope_dim) * PLAIN_ITEM_BYTES[self.kv_cache_dtype]

    @property
    def key_bytes(self) -> int:
        """Of one token in one layer that runs an indexer."""
        if self.indexer_kv_dtype == FP8:
            return Fp8Layout(num_fp8=self.index_dim).num_bytes
        return self.index_dim * PLAIN_ITEM_BYTES[self.indexer_kv_dtype]

    def bytes_per_token(self, num_layers: int, num_index_layers: int) -> int:
        """On the rank that owns the token; num_index_layers of the layers keep indexer keys."""
        return num_layers * self.latent_bytes + num_index_layers * self.key_bytes


def default_indexer_kv_dtype(kv_cache_dtype: str) -> str:
    """fp8 beside fp8_ds_mla, as in vLLM; else what the latents have."""
    return FP8 if kv_cache_dtype == FP8_DS_MLA else kv_cache_dtype


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
