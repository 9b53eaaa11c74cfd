import pytest
import torch
from torch import Tensor

from kernels_integration.kv_cache import KVCache, bytes_per_token
from kernels_integration.rows import RowBatch


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
    cache = KVCache.allocate(2, 8, 3, 2, torch.float32)
    slots = [5, 0, 7, 2][: len(write_rows)]
    latent, key = numbered(4, 3), numbered(4, 2, 100.0)
    cache.write(1, rows(4, write_rows, slots), latent, key)
    expected_latent, expected_key = torch.zeros(8, 3), torch.zeros(8, 2)
    for row, slot in zip(write_rows, slots, strict=True):
        expected_latent[slot], expected_key[slot] = latent[row], key[row]
    assert torch.equal(cache.latent(1), expected_latent)
    assert torch.equal(cache.index_keys(1), expected_key)
    assert not cache.latent(0).any()
    assert not cache.index_keys(0).any()


def test_write_rounds_to_the_storage_dtype() -> None:
    cache = KVCache.allocate(1, 4, 3, 2, torch.bfloat16)
    latent = torch.tensor([[1.0, 1.001, 3.14159]])
    cache.write(0, rows(1, [0], [2]), latent, torch.ones(1, 2))
    assert torch.equal(cache.latent(0)[2], latent[0].bfloat16())


def test_a_layer_without_an_indexer_keeps_its_keys() -> None:
    cache = KVCache.allocate(1, 4, 3, 2, torch.float32)
    cache.write(0, rows(1, [0], [2]), torch.ones(1, 3), None)
    assert cache.latent(0)[2].eq(1).all()
    assert not cache.index_keys(0).any()
    assert KVCache.allocate(1, 4, 3, None, torch.float32).keys == ()


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(slot: int) -> None:
    cache = KVCache.allocate(1, 4, 3, None, torch.float32)
    with pytest.raises(IndexError):
        cache.write(0, rows(1, [0], [slot]), torch.ones(1, 3), None)
    assert not cache.latent(0).any()


@pytest.mark.parametrize(("index_dim", "dtype"), [(None, torch.float32), (2, torch.bfloat16)])
def test_bytes_per_token_is_what_is_allocated(index_dim: int | None, dtype: torch.dtype) -> None:
    cache = KVCache.allocate(3, 7, 5, index_dim, dtype)
    assert cache.num_slots == 7
    assert cache.num_layers == 3
    assert cache.num_bytes == 7 * bytes_per_token(3, 5, index_dim, dtype)


def test_an_empty_cache_takes_an_empty_write() -> None:
    cache = KVCache.allocate(1, 0, 3, 2, torch.float32)
    cache.write(0, rows(0, [], []), torch.empty(0, 3), torch.empty(0, 2))
    assert cache.num_bytes == 0
