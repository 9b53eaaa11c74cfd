"""`latentray inspect`: facts against independent counts, all problems at once, exit codes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cluster.cli import main
from cluster.config import BUNDLED_CHECKPOINT, EngineArgs, load_settings
from kernels_integration.errors import ConfigError

EH_PROJ = "model.layers.6.eh_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_CHECKPOINT, tmp_path / "model"))


def inspect(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, argv), "--json"])
    assert int(caught.value.code or 0) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert bool(found["problems"]) is (code == 2)
    return found


def sizes(path: Path) -> dict[str, int]:
    """Values of each tensor, by the safetensors library."""
    counts = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            counts |= {name: handle.get_tensor(name).numel() for name in handle.keys()}  # noqa: SIM118
    return counts


def change(path: Path, edit: Any) -> None:
    file = next(f for f in path.glob("*.safetensors") if EH_PROJ in load_file(f))
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def change_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))


def test_facts_of_the_bundled_checkpoint(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(capsys, path)
    counts = sizes(path)
    mtp = sum(n for name, n in counts.items() if name.startswith("model.layers.6."))
    idle = sum(n for name, n in counts.items() if ".mlp.experts." in name) * 5 // 6 * 6 // 8
    model, files, shard = found["model"], found["files"], found["shard"]
    assert model["num_parameters"] == sum(counts.values()) - mtp
    assert (model["num_mtp_parameters"], files["num_mtp_modules"]) == (mtp, 1)
    assert model["num_active_parameters"] == model["num_parameters"] - idle
    assert (model["model_type"], model["num_layers"], model["num_dense_layers"]) == ("deepseek_v32", 6, 1)
    assert (model["indexer_layout"], model["index_topk"]) == ("FFFFFF", 64)
    assert files["num_files"] == 2
    assert files["num_bytes"] == sum(files["dtypes"].values()) == shard["file_bytes"]
    assert shard["weight_bytes"] == 4 * sum(counts.values())
    assert shard["kv_bytes_per_token"] == 7 * (128 + 32 + 64) * 4
    assert shard["num_tokens"] is None


def test_with_whole_experts_the_fullest_shard_counts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 experts on 3 shards: 3 on the last, where a part of each would be 8 / 3."""
    parts = inspect(capsys, path, "-tp", "3")["shard"]
    whole = inspect(capsys, path, "-tp", "3", "--enable-expert-parallel")["shard"]
    assert (parts["enable_expert_parallel"], whole["enable_expert_parallel"]) == (False, True)
    expert, layers = 3 * 256 * 192 * 4, 6  # five MoE layers and the MTP layer
    assert whole["weight_bytes"] - parts["weight_bytes"] == layers * (3 * expert - 8 * expert // 3)


def test_shards_and_memory(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = inspect(capsys, path, "--memory", "100M", "--dtype", "bfloat16")["shard"]
    two = inspect(capsys, path, "-tp", "2", "-dcp", "2", "--memory", "100M", "--dtype", "bfloat16")["shard"]
    assert one["weight_bytes"] / 2 < two["weight_bytes"] < one["weight_bytes"] * 0.6
    for shard in (one, two):
        dcp = shard["decode_context_parallel_size"]
        held = shard["num_tokens"] // dcp * shard["kv_bytes_per_token"] + shard["weight_bytes"]
        assert 0 <= 100 * 2**20 - held < 16 * shard["kv_bytes_per_token"]
    assert inspect(capsys, path, "--kv-cache-dtype", "float64")["shard"]["kv_bytes_per_token"] == (
        4 * one["kv_bytes_per_token"]
    )


def test_all_problems_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tensors, tokenizer, parallelism and memory; none hides another."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[EH_PROJ] = tensors[EH_PROJ][1:].contiguous()
        tensors["surprise"] = tensors["model.layers.6.enorm.weight"].clone()
        del tensors["model.layers.6.hnorm.weight"]

    change(path, edit)
    (path / "tokenizer.json").unlink()
    found = inspect(capsys, path, "-tp", "4", "-dcp", "3", "--memory", "1M", code=2)
    text = "\n".join(found["problems"])
    for words in (
        f"wrong shape {EH_PROJ}: [255, 512]",
        "unexpected  surprise",
        "model.layers.6.hnorm.weight is in",
        "no tokenizer.json",
        "decode-context-parallel-size 3",
    ):
        assert words in text
    assert len(found["problems"]) == 5
    found = inspect(capsys, path, "-tp", "4", "--memory", "1M", code=2)
    assert "memory 1.0 MiB does not hold a shard's weights" in found["problems"][-1]


def test_every_problem_of_the_config(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(
        path, hidden_act="gelu", scoring_func="softmax", quantization_config={"quant_method": "awq"}
    )
    (path / "model-00001-of-00002.safetensors").unlink()
    found = inspect(capsys, path, code=2)
    text = "\n".join(found["problems"])
    for words in ("hidden_act 'gelu'", "scoring_func 'softmax'", "'awq'", "lacks files"):
        assert words in text
    assert found["model"] is None
    assert found["files"]["num_files"] == 1


@pytest.mark.parametrize("content", ["{", "[]", "[" * 1000, '{"a": "\\ud800"}'])
def test_one_problem_of_a_file_is_told_once(
    path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json is read for the model and for the tokenizer."""
    (path / "config.json").write_text(content)
    (problem,) = inspect(capsys, path, code=2)["problems"]
    assert "config.json" in problem


def test_directories_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in inspect(capsys, tmp_path / "nowhere", code=2)["problems"][0]
    text = "\n".join(inspect(capsys, tmp_path, code=2)["problems"])
    assert "has no config.json" in text
    assert "has no tokenizer.json" in text
    assert "holds no *.safetensors" in text
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(tmp_path), "--memory", "much"])
    assert caught.value.code == 2
    assert "--memory is 'much'" in capsys.readouterr().err


def test_weights_without_mtp_are_served_without_drafts(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    mtp = [name for name in content["weight_map"] if name.startswith("model.layers.6.")]
    for name in mtp:
        del content["weight_map"][name]
    index.write_text(json.dumps(content))
    for file in path.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if n not in mtp}, file)
    found = inspect(capsys, path)
    assert "the weights hold 0: served without drafts" in found["notes"][0]
    assert found["shard"]["kv_bytes_per_token"] == 6 * (128 + 32 + 64) * 4


def test_values_are_read_only_when_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(path, lambda tensors: tensors[EH_PROJ].__setitem__((0, 0), float("nan")))
    inspect(capsys, path)
    found = inspect(capsys, path, "--check-values", code=2)
    assert [f"tensor {EH_PROJ} holds NaN" in problem for problem in found["problems"]] == [True]


@pytest.mark.slow
def test_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(path), "-tp", "2", "--memory", "1G", "--check-values"])
    assert not caught.value.code
    text = capsys.readouterr().out
    for words in (
        "12.5 million, MTP 1.8 million more",
        "in every layer",
        "27.3 MiB in 2 files",
        "can be served",
    ):
        assert words in text
    change_config(path, model_type="llama")
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(path)])
    assert caught.value.code == 2
    assert "cannot be served, 1 problem:\n  " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust-remote-code=true", None])
def test_remote_code_is_explained(
    flag: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag is None:
        monkeypatch.setenv("LATENTRAY_TRUST_REMOTE_CODE", "1")
    with pytest.raises(SystemExit) as caught:
        main(["config", "show", *([flag] if flag else [])])
    assert caught.value.code == 2
    assert "nothing in a checkpoint is executed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nothing in a checkpoint is executed"):
        load_settings(EngineArgs, {"trust_remote_code": True}, environ={})
    file = tmp_path / "settings.yaml"
    file.write_text("trust-remote-code: true\n")
    with pytest.raises(ConfigError, match="nothing in a checkpoint is executed"):
        load_settings(EngineArgs, config_file=file, environ={})
