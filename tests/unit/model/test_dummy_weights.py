"""Random weights instead of a checkpoint: what they are, who gets the same, and a group that runs on them."""

import json

import pytest
import torch

from actors.inline_group import InlineGroup
from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.dummy_weights import DEVIATION, DummyWeights
from actors.model.load_progress import LoadProgress
from actors.model.model import load_model, measure_shard
from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.reference.backend import TorchBackend
from tests.support.groups import request, run
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
def config_alone(tmp_path):
    """A folder with a config.json and nothing else."""
    write_tiny_model(tmp_path / "whole", "deepseek_v32")
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    return folder


def made(name: str, shape: tuple[int, ...], rows: range, columns: range) -> torch.Tensor:
    out = torch.full((len(rows), len(columns)), torch.nan)
    DummyWeights({name: shape}, (128, 128)).fill(name, rows, columns, out)
    return out


def test_norms_are_one_biases_zero_and_the_rest_normal():
    assert (made("a.norm.weight", (64,), range(64), range(1)) == 1).all()
    assert (made("a.norm.bias", (64,), range(64), range(1)) == 0).all()
    drawn = made("a.weight", (400, 300), range(400), range(300))
    assert abs(drawn.mean()) < DEVIATION / 50
    assert abs(drawn.std() / DEVIATION - 1) < 0.02


def test_the_same_slice_is_the_same_on_every_rank_and_others_are_not():
    whole = made("a.weight", (8, 6), range(8), range(6))
    assert torch.equal(whole, made("a.weight", (8, 6), range(8), range(6)))
    assert not torch.equal(whole, made("b.weight", (8, 6), range(8), range(6)))
    assert not torch.equal(whole[:4], made("a.weight", (8, 6), range(4, 8), range(6)))


def test_progress_counts_every_byte(config_alone):
    config = ModelConfig.from_pretrained(config_alone)
    solo, progress = SoloCollectives(), LoadProgress()
    arguments = {
        "dtype": torch.float32,
        "backend": TorchBackend(),
        "tp": solo,
        "dcp": DcpGroup(1, solo, "a2a"),
        "num_mtp_layers": 1,
    }
    model = load_model(config, config_alone, progress=progress, load_format="dummy", **arguments)
    size = measure_shard(config, {}, **arguments)
    assert progress.state().num_bytes == progress.state().total_bytes == size.file_bytes > 0
    assert model.norm.eq(1).all()


def test_a_group_runs_on_a_config_alone(config_alone):
    with pytest.raises(Exception, match="safetensors"):
        Checkpoint(config_alone).check({"model.norm.weight": (48,)}, {})
    settings = {"model": str(config_alone), "load_format": "dummy", "num_kv_blocks": 64}
    config = resolve(load_settings(EngineArgs, settings, environ={}).args)
    assert config.num_speculative_tokens == 3
    assert json.loads((config_alone / "config.json").read_text())["num_nextn_predict_layers"] == 1
    collected = run(InlineGroup(config), [request("a", [5, 6, 7], max_tokens=6, ignore_eos=True)])
    assert len(collected["a"].token_ids) == 6
