"""From settings and a checkpoint to a group, and every rule between them."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cluster.config import BUNDLED_CHECKPOINT, EngineArgs, load_settings
from cluster.config.resolve import resolve
from cluster.config.show import effective_settings
from cluster.llm import LLM
from cluster.report.inspection import inspect_checkpoint
from kernels_integration.errors import CheckpointError, ConfigError

# 6 layers and 1 MTP layer of 128 + 32 latent and 64 indexer values
VALUES_PER_TOKEN = 7 * (128 + 32 + 64)


def resolved(**settings: Any) -> Any:
    return resolve(load_settings(EngineArgs, settings, environ={}).args)


@pytest.fixture
def without_mtp(tmp_path: Path) -> Path:
    """As converters leave a checkpoint: the config announces an MTP layer that the tensors lack."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUNDLED_CHECKPOINT / name, tmp_path)
    index = json.loads((BUNDLED_CHECKPOINT / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        n: f for n, f in index["weight_map"].items() if not n.startswith("model.layers.6.")
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_defaults_serve_the_bundled_checkpoint() -> None:
    config = resolved()
    assert Path(config.model_path) == BUNDLED_CHECKPOINT
    assert config.served_model_name == "tiny-dsa"
    assert (config.tensor_parallel_size, config.decode_context_parallel_size) == (1, 1)
    assert config.num_speculative_tokens == 3
    assert config.max_model_len == 2048
    assert (config.dtype, config.kv_cache_dtype, config.attention_backend) == ("float32", "float32", "auto")
    assert config.num_kv_blocks == 512 * 2**20 // (16 * VALUES_PER_TOKEN * 4)


@pytest.mark.parametrize(
    ("settings", "bytes_per_block"),
    [
        ({"dtype": "float64"}, 16 * VALUES_PER_TOKEN * 8),
        ({"dtype": "float64", "kv_cache_dtype": "bfloat16"}, 16 * VALUES_PER_TOKEN * 2),
        ({"num_speculative_tokens": 0}, 16 * VALUES_PER_TOKEN * 4 * 6 // 7),
        ({"block_size": 64}, 64 * VALUES_PER_TOKEN * 4),
        ({"kv_cache_dtype": "fp8_ds_mla"}, 16 * 7 * ((128 + 4 + 64 + 12) + (64 + 4 + 12))),
        ({"kv_cache_dtype": "fp8_ds_mla", "indexer_kv_dtype": "float32"}, 16 * 7 * (208 + 256)),
        ({"kv_cache_dtype": "bfloat16", "indexer_kv_dtype": "fp8"}, 16 * 7 * (320 + 80)),
    ],
)
def test_the_budget_is_cut_into_blocks(settings: dict[str, Any], bytes_per_block: int) -> None:
    assert resolved(kv_cache_memory_bytes="64M", **settings).num_kv_blocks == 2**26 // bytes_per_block


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8_ds_mla"])
def test_the_budget_is_what_a_shard_allocates(kv_cache_dtype: str) -> None:
    """The arithmetic here and the storage of the shards are two codes: they must agree to the byte."""

    from actors.model.config import ModelConfig
    from kernels_integration.kv_cache import KVCache

    config = resolved(kv_cache_memory_bytes="1M", kv_cache_dtype=kv_cache_dtype)
    layout = ModelConfig.from_pretrained(BUNDLED_CHECKPOINT).kv_layout(config.kv_cache_dtype)
    cache = KVCache.allocate(layout, 7, config.num_kv_blocks * config.block_size)
    assert 2**20 - cache.num_bytes // config.num_kv_blocks < cache.num_bytes <= 2**20


def test_indexer_keys_are_fp8_beside_fp8_latents() -> None:
    assert resolved(kv_cache_dtype="fp8_ds_mla").indexer_kv_dtype == "fp8"
    assert resolved(kv_cache_dtype="bfloat16").indexer_kv_dtype == "bfloat16"
    assert resolved(kv_cache_dtype="fp8_ds_mla", indexer_kv_dtype="float32").indexer_kv_dtype == "float32"


def test_a_format_for_keys_that_a_model_lacks_is_refused(tmp_path: Path) -> None:
    config = json.loads((BUNDLED_CHECKPOINT / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    resolved(model=tmp_path, kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(ConfigError, match=r"indexer-kv-dtype is fp8, but .* has no indexer; use auto"):
        resolved(model=tmp_path, indexer_kv_dtype="fp8")


def test_the_context_follows_the_cache_where_it_is_not_given() -> None:
    """The last token has no KV: 10 blocks of 16 serve 161 tokens; dcp 2 doubles what a block covers."""
    assert resolved(num_kv_blocks=10).max_model_len == 161
    dcp2 = resolved(num_kv_blocks=10, tensor_parallel_size=2, decode_context_parallel_size=2)
    assert dcp2.max_model_len == 321
    assert resolved(num_kv_blocks=10, max_model_len=161).max_model_len == 161


def test_without_mtp_weights_nothing_is_drafted(without_mtp: Path) -> None:
    assert resolved(model=without_mtp).num_speculative_tokens == 0
    with pytest.raises(ConfigError, match=r"has no MTP weights \(model\.layers\.6\.\*\); use 0"):
        resolved(model=without_mtp, num_speculative_tokens=1)


@pytest.fixture
def with_mtp_modules(tmp_path: Path) -> Callable[..., Path]:
    """The bundled checkpoint with these MTP modules in its files, of so many that config.json announces."""

    def make(announced: int, held: Iterable[int]) -> Path:
        config = json.loads((BUNDLED_CHECKPOINT / "config.json").read_text())
        config["num_nextn_predict_layers"] = announced
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_CHECKPOINT / name, tmp_path)
        tensors = {
            n: t for file in BUNDLED_CHECKPOINT.glob("*.safetensors") for n, t in load_file(file).items()
        }
        module = {n: tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.6.")}
        for layer in (6 + k for k in held):
            tensors |= {n.replace("layers.6.", f"layers.{layer}."): t.clone() for n, t in module.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("announced", "held", "default", "most", "lacking"),
    [(2, [0, 1], 3, 8, None), (2, [0], 0, 1, 7), (2, [1], 0, 0, 6), (5, [0, 1, 2], 3, 3, 9)],
)
def test_modules_that_drafts_come_from_must_be_there(
    with_mtp_modules: Callable[..., Path],
    announced: int,
    held: list[int],
    default: int,
    most: int,
    lacking: int | None,
) -> None:
    path = with_mtp_modules(announced, held)
    assert resolved(model=path).num_speculative_tokens == default
    assert resolved(model=path, num_speculative_tokens=most).num_speculative_tokens == most
    if lacking is not None:
        with pytest.raises(ConfigError, match=rf"has no MTP weights \(model\.layers\.{lacking}\.\*\); use"):
            resolved(model=path, num_speculative_tokens=most + 1)
    found = inspect_checkpoint(path)
    assert (found.problems, found.shard is not None) == ([], True)
    assert ("served without drafts" in "".join(found.notes)) == (default == 0)
    with LLM(path, executor="inline", num_kv_blocks=8) as llm:
        assert llm.group_config.num_speculative_tokens == default


def test_headers_say_whether_there_are_mtp_weights(with_mtp_modules: Callable[..., Path]) -> None:
    path = with_mtp_modules(1, [0])
    names = [n for n in load_file(path / "model.safetensors") if not n.startswith("model.layers.6.")]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolved(model=path).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("more.safetensors", b"\xff" * 64),
        ("more.safetensors", b""),
        ("model.safetensors.index.json", b'{"weight_map": [[1, 2]]}'),
        ("model.safetensors.index.json", b"[]"),
    ],
)
def test_broken_files_are_the_loaders_to_report(
    with_mtp_modules: Callable[..., Path], file: str, content: bytes
) -> None:
    path = with_mtp_modules(1, [0])
    (path / file).write_bytes(content)
    resolved(model=path)
    with pytest.raises(CheckpointError, match=re.escape(file)):
        LLM(path, executor="inline", num_kv_blocks=8)


def test_a_path_is_its_own_name(without_mtp: Path) -> None:
    assert resolved(model=without_mtp).served_model_name == str(without_mtp)
    assert resolved(model=without_mtp, served_model_name="mine").served_model_name == "mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 16}, ["tensor-parallel-size 16", "num_attention_heads 8", "use 8 or less"]),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            ["decode-context-parallel-size 3", "tensor-parallel-size 4", "1, 2 or 4"],
        ),
        ({"cp_kv_cache_interleave_size": 3}, ["interleave-size 3", "block-size 16", "1, 2, 4, 8, 16"]),
        ({"cp_kv_cache_interleave_size": 32}, ["interleave-size 32", "block-size 16"]),
        ({"max_model_len": 4096}, ["max-model-len 4096", "max_position_embeddings 2048", "at most 2048"]),
        (
            {"num_kv_blocks": 3, "max_model_len": 50},
            ["max-model-len 50", "49 tokens in 3 blocks", "--num-kv-blocks 4"],
        ),
        ({"kv_cache_memory_bytes": "1K"}, ["1.0 KiB", "one block", "98.0 KiB"]),
        ({"kv_cache_memory_bytes": "1M", "num_kv_blocks": 4}, ["num-kv-blocks 4", "1048576", "one of them"]),
        (
            {"max_num_batched_tokens": 3},
            ["max-num-batched-tokens 3", "num-speculative-tokens 3", "use 4 or more"],
        ),
    ],
)
def test_rules_between_settings(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**settings)
    for word in words:
        assert word in str(caught.value)


def test_the_fix_of_a_message_works() -> None:
    assert resolved(num_kv_blocks=4, max_model_len=50).max_model_len == 50
    assert resolved(kv_cache_memory_bytes=4 * 16 * VALUES_PER_TOKEN * 4, max_model_len=50).num_kv_blocks == 4
    assert resolved(max_num_batched_tokens=4).max_num_batched_tokens == 4


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such model path: .*/nope; --model must be a directory"):
        resolved(model=tmp_path / "nope")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolved(model=tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"'gpt2' is not supported; supported: .*deepseek_v32"):
        resolved(model=tmp_path)


def test_show_tells_where_each_value_came_from() -> None:
    settings = load_settings(
        EngineArgs, {"num_kv_blocks": 10}, spelling="flag", environ={"LATENTRAY_DTYPE": "auto"}
    )
    shown = {s.name: s for s in effective_settings(settings, resolve(settings.args))}
    assert (shown["num_kv_blocks"].value, shown["num_kv_blocks"].origin) == (10, "flag --num-kv-blocks")
    assert (shown["max_model_len"].value, shown["max_model_len"].origin) == (161, "derived")
    assert (shown["dtype"].value, shown["dtype"].origin) == ("float32", "derived from auto")
    assert shown["block_size"].origin == "default"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory_bytes": "100000T"}, "100000.0 TiB is more than 64.0 TiB a shard; use 98.0 KiB to"),
        ({"num_kv_blocks": 999999999999999}, f"use 1 to {2**46 // (16 * VALUES_PER_TOKEN * 4)}"),
        (
            {"max_num_seqs": 999999999999},
            "max_num_seqs is 999999999999; it must be a whole number from 1 to 65536",
        ),
        (
            {"block_size": 99999999999, "num_kv_blocks": 1},
            "block_size is 99999999999; it must be a whole number from 1 to 65536",
        ),
    ],
)
def test_sizes_beyond_any_machine_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolved(**settings)


def test_sizes_of_a_large_machine_resolve() -> None:
    resolved(kv_cache_memory_bytes="64T")
    resolved(max_num_seqs=65536, block_size=65536, num_kv_blocks=1)


def test_a_path_of_an_unknown_user_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match="no such model path: ~nouser/x;"):
        resolved(model="~nouser/x")
    with pytest.raises(ConfigError, match="chat-template ~nouser/x is no file"):
        resolved(chat_template="~nouser/x")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_device(monkeypatch: pytest.MonkeyPatch, has_gpu: bool):
    """auto takes a GPU for one shard; the backend is then chosen where the GPU is."""
    monkeypatch.setattr("cluster.config.resolve._finds_gpu", lambda: has_gpu)
    monkeypatch.setattr("cluster.config.gpu_memory.memory_bytes", lambda: (64 << 30, 60 << 30))
    config = resolved()
    assert (config.device, config.attention_backend) == ("cuda" if has_gpu else "cpu", "auto")
    assert config.scheduling == ("deferred" if has_gpu else "sync")
    assert resolved(scheduling="sync").scheduling == "sync"
    assert resolved(device="cpu").device == "cpu"
    assert resolved(tensor_parallel_size=2).device == "cpu"
    if has_gpu:
        assert resolved(device="cuda").device == "cuda"
        with pytest.raises(ConfigError, match=r"tensor-parallel-size 2.*use --tensor-parallel-size 1"):
            resolved(device="cuda", tensor_parallel_size=2)
    else:
        with pytest.raises(ConfigError, match="finds no GPU; use --device cpu"):
            resolved(device="cuda")
