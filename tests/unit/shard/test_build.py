"""A shard that memory does not hold."""

import re
from typing import Any

import pytest

from actors.config import GroupConfig
from actors.shard import build
from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve
from kernels_integration.collectives import SoloCollectives
from kernels_integration.errors import ConfigError
from kernels_integration.kv_cache import KVCache


def tiny_group(**settings: Any) -> GroupConfig:
    return resolve(load_settings(EngineArgs, {"num_kv_blocks": 4} | settings, environ={}).args)


def build_alone(config: GroupConfig) -> None:
    build.build_shard(config, tp=SoloCollectives(), dcp_comm=SoloCollectives())


def failing(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_cache_that_memory_does_not_hold_is_a_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr(KVCache, "allocate", failing(error))
    num_bytes = 4 * 16 * 7 * (128 + 32 + 64) * 4
    with pytest.raises(ConfigError, match=rf"{num_bytes} bytes.* smaller --kv-cache-memory-bytes"):
        build_alone(tiny_group())


def test_a_state_that_memory_does_not_hold_is_a_setting_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    error = MemoryError("Unable to allocate 8.00 PiB")
    monkeypatch.setattr("actors.shard.shard.BlockTables", failing(error))
    with pytest.raises(ConfigError, match=re.escape("smaller --max-num-seqs or --max-model-len (Unable to")):
        build_alone(tiny_group())


def test_another_fault_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "allocate", failing(RuntimeError("a kernel is missing")))
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        build_alone(tiny_group())
