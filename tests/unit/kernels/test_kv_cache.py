import pytest
import torch
from torch import Tensor

from kernels_integration.kv_cache import KVCache
from kernels_integration.kv_layout import KVLayout
from kernels_integration.reference.rows import store
from kernels_integration.rows import RowBatch


def layout(dtype: str = "float32", index_dim: int = 2, indexer_kv_dtype: str | None = None) -> KVLayout:
    """Latents of 2 + 1 values."""
    return KVLayout(
        kv_cache_dtype=dtype,
        indexer_kv_dtype=indexer_kv_dtype or dtype,
        latent_rank=2,
        rope_dim=1,
        index_dim=index_dim,
    )


def rows(num_rows: int, write_rows: list[int], write_slots: list[int]) -> RowBatch:
    positions = torch.arange(num_rows)
    return RowBatch(
        positions=positions,
        visible_from=torch.zeros_like(positions),
        visible_to=positions + 1,
        write_rows=torch.tensor(write_rows, dtype=torch.int64),
        write_slots=torch.tensor(write_slots, dtype=torch.int64),
        groups=(),
        max_visible=num_rows,
    )


def numbered(num_rows: int, dim: int, start: float = 1.0) -> Tensor:
    return torch.arange(num_rows * dim, dtype=torch.float32).view(num_rows, dim) + start


@pytest.mark.parametrize("write_rows", [[0, 1, 2, 3], [1, 3], [2], []])
def test_write_stores_the_owned_rows_and_nothing_else(write_rows: list[int]) -> None:
    cache = KVCache.allocate(layout(), 2, 8)
    slots = [5, 0, 7, 2][: len(write_rows)]
    latent, key = numbered(4, 3), numbered(4, 2, 100.0)
    stored = rows(4, write_rows, slots)
    store(latent, cache.latent(1), stored)
    store(key, cache.index_keys(1), stored)
    expected_latent, expected_key = torch.zeros(8, 3), torch.zeros(8, 2)
    for row, slot in zip(write_rows, slots, strict=True):
        expected_latent[slot], expected_key[slot] = latent[row], key[row]
    assert torch.equal(cache.latent(1).storage, expected_latent)
    assert torch.equal(cache.index_keys(1).storage, expected_key)
    assert not cache.latent(0).storage.any()
    assert not cache.index_keys(0).storage.any()


def test_write_rounds_to_the_storage_dtype() -> None:
    cache = KVCache.allocate(layout("bfloat16"), 1, 4)
    latent = torch.tensor([[1.0, 1.001, 3.14159]])
    store(latent, cache.latent(0), rows(1, [0], [2]))
    assert torch.equal(cache.latent(0).storage[2], latent[0].bfloat16())


def test_a_layer_without_an_indexer_keeps_no_keys() -> None:
    cache = KVCache.allocate(layout(), 2, 4, index_layers=[1])
    assert cache.index_keys(0).num_slots == 0
    assert cache.index_keys(1).num_slots == 4
    assert KVCache.allocate(layout(index_dim=0), 1, 4).keys == ()


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(slot: int) -> None:
    cache = KVCache.allocate(layout(index_dim=0), 1, 4)
    with pytest.raises(IndexError):
        store(torch.ones(1, 3), cache.latent(0), rows(1, [0], [slot]))
    assert not cache.latent(0).storage.any()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "indexer_kv_dtype", "index_dim"),
    [
        ("float32", "float32", 0),
        ("bfloat16", "bfloat16", 2),
        ("bfloat16", "fp8", 2),
        ("fp8_ds_mla", "fp8", 2),
        ("fp8_ds_mla", "float64", 5),
    ],
)
@pytest.mark.parametrize("index_layers", [None, (0, 2), ()])
def test_bytes_per_token_is_what_is_allocated(
    kv_cache_dtype: str, indexer_kv_dtype: str, index_dim: int, index_layers: tuple[int, ...] | None
) -> None:
    """The arithmetic of budgets and the storage of shards are two codes: they must agree to the byte."""
    formats = layout(kv_cache_dtype, index_dim, indexer_kv_dtype)
    cache = KVCache.allocate(formats, 3, 7, index_layers=index_layers)
    assert cache.num_slots == 7
    assert cache.num_layers == 3
    num_index_layers = 3 if index_layers is None else len(index_layers)
    assert cache.num_bytes == 7 * formats.bytes_per_token(3, num_index_layers)


def test_an_empty_cache_takes_an_empty_write() -> None:
    cache = KVCache.allocate(layout(), 1, 0)
    store(torch.empty(0, 3), cache.latent(0), rows(0, [], []))
    assert cache.num_bytes == 0
