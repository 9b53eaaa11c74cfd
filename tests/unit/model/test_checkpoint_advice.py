"""Checkpoints as people really have them: what loads, and what the message says of the rest."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.tensors import main_tensor_shapes
from cluster.config import EngineArgs
from cluster.config.resolve import resolve
from kernels_integration.errors import CheckpointError
from tests.support.random_checkpoint import write_random_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path)


def problems(path):
    config = ModelConfig.from_pretrained(path)
    with Checkpoint(path) as checkpoint:
        return checkpoint.find_problems(main_tensor_shapes(config), {}), checkpoint.notes


def change_config(path, **fields):
    file = path / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_named(path):
    """Whether or not drafts are asked for; without drafts the loader says the same."""
    prefix = f"model.layers.{ModelConfig.from_pretrained(path).num_hidden_layers}."
    tensors = load_file(path / "model.safetensors")
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in mtp}
    (path / "model.safetensors").unlink()
    save_file(rest, path / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(rest, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(mtp, "model-00002-of-00002.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": files}))
    for drafts in (None, 1, 3):
        with pytest.raises(CheckpointError, match=r"lacks files that .* names: model-00002-of-00002\.saf"):
            resolve(EngineArgs(model=str(path), num_speculative_tokens=drafts))
    assert resolve(EngineArgs(model=str(path), num_speculative_tokens=0)).num_speculative_tokens == 0


def test_what_macos_leaves_beside_a_file_is_not_read(path):
    (path / "._model.safetensors").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        ")
    config = ModelConfig.from_pretrained(path)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.problems == []
        assert set(main_tensor_shapes(config)) <= set(checkpoint)


def test_an_index_with_a_byte_order_mark_is_read(path):
    names = list(load_file(path / "model.safetensors"))
    index = json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    (path / INDEX).write_bytes(index.encode("utf-8-sig"))
    with Checkpoint(path) as checkpoint:
        assert checkpoint.problems == []


def test_scales_of_an_fp8_cache_are_noted_and_left_alone(path):
    file = path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.ones(1)
        for layer in range(2)
        for name in ("k_scale", "v_scale", "attn.k_scale")
    }
    save_file(load_file(file) | scales, file)
    found, notes = problems(path)
    assert not any("scale" in problem for problem in found)
    assert len(notes) == 1
    assert notes[0].startswith("6 scales of an FP8 KV cache, such as model.layers.0.self_attn.")


@pytest.mark.parametrize("announced", [0, ...], ids=["none", "not mentioned"])
def test_mtp_modules_that_config_json_does_not_announce_are_named_once(path, announced):
    change_config(path, num_nextn_predict_layers=announced)
    layer = ModelConfig.from_pretrained(path).num_hidden_layers
    [problem] = problems(path)[0]
    assert f"tensors of layer {layer}, such as model.layers.{layer}." in problem
    assert "these are MTP modules: raise num_nextn_predict_layers by 1 there, or delete them" in problem


def test_layers_that_config_json_does_not_announce_are_named_once(path):
    num_layers = ModelConfig.from_pretrained(path).num_hidden_layers
    tensors = load_file(path / "model.safetensors")
    mtp = f"model.layers.{num_layers}."
    save_file({n: t for n, t in tensors.items() if not n.startswith(mtp)}, path / "model.safetensors")
    change_config(path, num_hidden_layers=num_layers - 1, num_nextn_predict_layers=0, indexer_types=...)
    [problem] = problems(path)[0]
    assert f"tensors of layer {num_layers - 1}, such as" in problem
    assert problem.endswith("correct num_hidden_layers there, or delete them")


def test_a_stack_of_experts_that_no_file_could_hold_is_not_expanded(path):
    """Its header costs a few bytes, its names would take all memory."""
    file = path / "model.safetensors"
    name = "model.layers.1.mlp.experts.down_proj"
    entry = {"dtype": "F32", "shape": [10**9, 0, 1], "data_offsets": [0, 0]}
    header = json.dumps({name: entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"unexpected  {name}, shape [1000000000, 0, 1] in {file.name}" in problems(path)[0]


@pytest.mark.parametrize("seed", range(12))
def test_any_damage_to_a_header_is_a_problem_and_never_another_exception(path, seed):
    """Bytes changed, cut and inserted; numbers, shapes and names replaced by what JSON can hold."""
    rng = random.Random(seed)
    file = path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    values = [
        b"-1",
        b"1e9",
        b"null",
        b"[]",
        b"{}",
        b'"\\ud800"',
        b"7" * 5000,
        b"1" * 18,
        b"true",
        b"[" * 5000,
    ]
    for _ in range(15):
        text = bytearray(header)
        if rng.random() < 0.5:
            at = rng.choice([match.start() for match in re.finditer(rb"\d+|\"F32\"", header)])
            end = re.compile(rb"\d+|\"F32\"").match(header, at).end()
            text[at:end] = rng.choice(values)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        size = len(text) if rng.random() < 0.8 else rng.choice([0, 2**63, len(text) // 2, len(content)])
        file.write_bytes(size.to_bytes(8, "little") + bytes(text) + data)
        found, _ = problems(path)
        assert max(map(len, found), default=0) < 5000, [p[:300] for p in found if len(p) >= 5000]
        if bytes(text) != header:
            resolve(EngineArgs(model=str(path)))  # reads the names alone, and leaves the rest to the loader
