"""The KV cache on a GPU: what its memory leaves, and what is said where it leaves nothing."""

import pytest

from cluster.config import EngineArgs, gpu_memory, load_settings, resolve
from cluster.config.resolve import MOST_KV_OF_REQUESTS
from kernels_integration.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """Tells how much memory a GPU that is not there has."""

    def with_memory(total: int, free: int) -> None:
        monkeypatch.setattr(resolve, "_finds_gpu", lambda: True)
        monkeypatch.setattr(gpu_memory, "memory_bytes", lambda: (total, free))

    return with_memory


def resolved(**settings):
    return resolve.resolve(load_settings(EngineArgs, {"device": "cuda", **settings}, environ={}).args)


def test_the_kv_cache_gets_what_the_rest_leaves(gpu):
    total, bytes_per_block = 4 * GIB, 16 * 6272
    gpu(total, total)
    first = resolved()
    gpu(total, total - 100 * bytes_per_block)
    assert resolved().num_kv_blocks == first.num_kv_blocks - 100
    gpu(total, total)
    more = resolved(gpu_memory_utilization=1)
    assert more.num_kv_blocks - first.num_kv_blocks == pytest.approx(0.1 * total / bytes_per_block, abs=2)


def test_no_more_than_requests_can_use(gpu):
    gpu(80 * GIB, 80 * GIB)
    config = resolved(max_num_seqs=2, max_model_len=512)
    assert config.num_kv_blocks * 16 == MOST_KV_OF_REQUESTS * 2 * 512


def test_max_model_len_follows(gpu):
    gpu(3 * GIB, 3 * GIB)
    whole = resolved(max_num_seqs=1, max_num_batched_tokens=64)
    gpu(3 * GIB, 3 * GIB - (whole.num_kv_blocks - 8) * 16 * 6272)
    small = resolved(max_num_seqs=1, max_num_batched_tokens=64)
    assert small.max_model_len == min(small.num_kv_blocks * 16 + 1, whole.max_model_len)


def test_sizes_that_are_given_ask_no_gpu(gpu, monkeypatch):
    gpu(0, 0)
    monkeypatch.setattr(gpu_memory, "memory_bytes", lambda: pytest.fail("asked"))
    assert resolved(num_kv_blocks=7).num_kv_blocks == 7


def test_too_little_memory_says_where_it_went(gpu):
    gpu(8 * GIB, 1 * GIB)
    with pytest.raises(
        ConfigError, match=r"gpu-memory-utilization 0.9 of 8.0 GiB: in use 7.0 GiB, weights .*raise"
    ):
        resolved()


@pytest.mark.parametrize("value", [0, -0.5, 1.5])
def test_a_share_is_above_0_and_at_most_1(value):
    with pytest.raises(ConfigError, match="share above 0 and at most 1"):
        resolved(gpu_memory_utilization=value)
