"""docs/sizing.md: its figures are those of the models' published shapes, as transformers has them."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from actors.model.config import ModelConfig
from actors.model.tensors import parameter_counts

PAGE = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text()
TYPES = {"DeepSeek-V3": "deepseek_v3", "DeepSeek-V3.2": "deepseek_v32", "GLM-5": "glm_moe_dsa"}


def _model(name: str, folder: Path) -> ModelConfig:
    shapes = AutoConfig.for_model(TYPES[name]).to_dict() | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(shapes))
    return ModelConfig.from_pretrained(folder)


def _row(name: str, model: ModelConfig) -> str:
    counts = parameter_counts(model)
    billions = [f"{n / 1e9:.1f} billion" for n in (counts.main, counts.main + counts.mtp, counts.active)]
    weights = f"{2 * (counts.main + counts.mtp) / 2**30:.1f} GiB"
    kv = [f"{model.kv_bytes_per_token(1, dtype)} B" for dtype in ("float32", "bfloat16", "fp8_ds_mla")]
    return f"| {' | '.join([name, *billions, weights, *kv])} |"


@pytest.mark.parametrize("name", TYPES)
def test_the_table_is_computed(name: str, tmp_path: Path) -> None:
    assert _row(name, _model(name, tmp_path)) in PAGE


def test_the_worked_example_adds_up(tmp_path: Path) -> None:
    model = _model("GLM-5", tmp_path)
    counts = parameter_counts(model)
    tokens, weights = 16 * 131072, 2 * (counts.main + counts.mtp)
    kv = tokens * model.kv_bytes_per_token(1, "fp8_ds_mla")
    assert f"{tokens / 1e6:.1f} million, which take {kv / 1e9:.0f} GB of KV" in PAGE
    assert f"in bfloat16: {weights / 1e12:.1f} TB" in PAGE
    for num_shards, words in ((16, "{} GB of weights and {} GB of KV each"), (8, "shards: {} GB and {} GB")):
        assert words.format(round(weights / num_shards / 1e9), round(kv / num_shards / 1e9)) in PAGE
    totals = [round((weights + kv) / num_shards / 0.9 / 1e9) for num_shards in (16, 8)]
    assert re.findall(r"(\d+) GB a shard", PAGE) == [str(total) for total in totals]


def test_a_million_tokens(tmp_path: Path) -> None:
    kv = 1e6 * _model("DeepSeek-V3.2", tmp_path).kv_bytes_per_token(1, "fp8_ds_mla")
    assert f"in `fp8_ds_mla` are {kv / 1e9:.1f} GB" in PAGE
