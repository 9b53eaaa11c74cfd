"""Fields of config.json: which are read, which may be there, and what is said of the others."""

import inspect as python_inspect
import json
from typing import Any

import pytest
from transformers import DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig

from actors.model.config import ModelConfig
from actors.model.known_fields import HARMLESS, USED, group_of, unknown_fields
from cluster.config import BUNDLED_CHECKPOINT
from cluster.report.inspection import inspect_checkpoint
from kernels_integration.errors import CheckpointError
from tests.support.random_checkpoint import BASE_CONFIG, write_random_checkpoint

YARN = {
    "type": "yarn",
    "factor": 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


class Recording(dict[str, Any]):
    """Notes every field that is asked for."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def test_what_is_read_is_what_is_listed_as_used():
    """Over configs that reach every branch of the reader."""
    read = set()
    for change in (
        {},
        {"rope_scaling": YARN},
        {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": None},
        {"num_nextn_predict_layers": None, "num_mtp_layers": 1},
        {"indexer_types": ["full"] * 3},
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"quantization_config": FP8},
        {"torch_dtype": None, "dtype": "float32"},
        {"model_type": "deepseek_v3", "q_lora_rank": None},
    ):
        raw = Recording(BASE_CONFIG | change)
        ModelConfig.from_dict(raw)
        read |= raw.read
    # The frontend reads this one.
    assert read | {"eos_token_id"} == USED
    assert not USED & HARMLESS


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama_4_scaling", {"llama_4_scaling": {"beta": 0.1}}),
        ("attn_factor", {"rope_scaling": YARN | {"attn_factor": 0.5}}),
        ("extrapolation_factor", {"rope_scaling": YARN | {"extrapolation_factor": 0.0}}),
        ("beta_fsat", {"rope_scaling": YARN | {"beta_fsat": 4}}),
        ("factor", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 4}}),
        ("sliding_window", {"sliding_window": 128}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("use_qk_norm", {"use_qk_norm": True}),
        ("index_kpool", {"index_kpool": 4}),
        ("indexTopkBlocks", {"indexTopkBlocks": 3}),
        ("expert_dtype", {"expert_dtype": "fp4"}),
        ("num_experts", {"num_experts": 5}),
        ("moe_router_scaling", {"moe_router_scaling": 2}),
        ("kv_cache_quant_algo", {"quantization_config": FP8 | {"kv_cache_quant_algo": "FP8"}}),
        ("compress_ratios", {"compress_ratios": [1, 4]}),
        ("mlp_bias", {"mlp_bias": True}),
        ("sliding_attention", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_field_that_may_change_the_mathematics_is_refused_by_name(name, change):
    with pytest.raises(CheckpointError, match=rf"\b{name}\b"):
        ModelConfig.from_dict(BASE_CONFIG | change)


@pytest.mark.parametrize("value", [None, False, {}, [], ""])
def test_an_unknown_field_that_asks_for_nothing_is_accepted(value):
    assert ModelConfig.from_dict(BASE_CONFIG | {"sliding_window": value}) == ModelConfig.from_dict(
        BASE_CONFIG
    )


def test_factors_that_change_nothing_are_accepted():
    neutral = {"attn_factor": 1.0, "extrapolation_factor": 1}
    plain = ModelConfig.from_dict(BASE_CONFIG | {"rope_scaling": YARN})
    assert ModelConfig.from_dict(BASE_CONFIG | {"rope_scaling": YARN | neutral}) == plain


@pytest.mark.parametrize("config", [DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig])
def test_all_that_transformers_writes_is_known(config):
    written = set(config().to_dict()) | set(python_inspect.signature(config).parameters)
    assert [name for name in unknown_fields(dict.fromkeys(written - {"kwargs"})) if group_of(name)] == []
    assert unknown_fields(config().to_dict()) == []


def test_released_configs_are_known():
    """GLM-5.2's and DeepSeek-V3.2's fields."""
    released = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "head_dim": 192,
        "index_share_for_mtp_iteration": True,
        "index_topk_pattern": None,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 3,
        "moe_layer_freq": 1,
        "qk_head_dim": 32,
        "ep_size": 1,
        "pretraining_tp": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"]},
    }
    assert unknown_fields(BASE_CONFIG | released) == []
    ModelConfig.from_dict(BASE_CONFIG | released)
    bundled = json.loads((BUNDLED_CHECKPOINT / "config.json").read_text())
    assert unknown_fields(bundled) == []


def test_inspect_shows_what_it_does_not_know(tmp_path):
    write_random_checkpoint(tmp_path, {"hobby": "chess", "hc_mult": 4})
    notes = inspect_checkpoint(tmp_path).notes
    assert "config.json has fields that are not known and not used: hobby, hc_mult" in notes
