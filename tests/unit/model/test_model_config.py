import json

import pytest
from random_checkpoint import BASE_CONFIG

from actors.model.config import ModelConfig
from actors.model.tensors import parameter_counts
from kernels_integration.errors import CheckpointError, ConfigError


def config(**overrides):
    return ModelConfig.from_dict({**BASE_CONFIG, **overrides})


def refusal(**overrides):
    with pytest.raises(CheckpointError) as info:
        config(**overrides)
    return str(info.value)


def test_bundled_checkpoint(tiny_dsa):
    loaded = ModelConfig.from_pretrained(tiny_dsa)
    assert loaded.model_type == "deepseek_v32"
    assert loaded.latent_dim == 160
    assert loaded.mla_scale == 64**-0.5
    assert (loaded.has_indexer, loaded.num_mtp_layers) == (True, 1)
    assert loaded.torch_dtype == "bfloat16"
    assert [loaded.is_moe_layer(i) for i in (0, 1, 6)] == [False, True, True]
    counts = parameter_counts(loaded)
    # The checkpoint's README: 12.51 M main, 1.78 M MTP layer.
    assert round(counts.main / 1e6, 2) == 12.51
    assert round(counts.mtp / 1e6, 2) == 1.78
    assert counts.active == counts.main - 5 * 6 * 3 * 256 * 192


def test_missing_path_file_instead_of_directory_and_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; pass a directory"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        ModelConfig.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        ModelConfig.from_pretrained(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="one JSON object"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    assert ModelConfig.from_pretrained(tmp_path) == config()


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", None])
def test_unsupported_model_type_lists_the_supported(model_type):
    assert f"model_type {model_type!r} is not supported; supported: deepseek_v32" in refusal(
        model_type=model_type
    )


def test_every_wrong_field_is_named_at_once():
    message = refusal(hidden_size=None, q_lora_rank="96", n_group=True, rms_norm_eps=0, norm_topk_prob=1)
    assert "hidden_size is missing; it must be an integer >= 1" in message
    assert "q_lora_rank is '96'; it must be an integer >= 1" in message
    assert "n_group is True" in message
    assert "rms_norm_eps is 0; it must be a number > 0" in message
    assert "norm_topk_prob is 1; it must be true or false" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling of type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters of type 'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size is None"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; it must be an integer from 0 to 1"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; it must be one of bfloat16"),
        ({"n_group": 4}, "n_group 4 must divide n_routed_experts 6"),
        ({"n_group": 6}, "n_group 6 leaves 1 expert in a group"),
        ({"topk_group": 4}, "topk_group 4 must be at most n_group 3"),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok 5 must be at most the experts of topk_group 2 groups",
        ),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
        ({"kv_lora_rank": 41}, "kv_lora_rank 41 must be even"),
        ({"index_head_dim": 6}, "index_head_dim 6 must be at least qk_rope_head_dim 8"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 must be at most num_hidden_layers 3"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types is"),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "first_k_dense_replace is 1; it must be 2"),
    ],
)
def test_what_cannot_be_served_is_refused(overrides, message):
    assert message in refusal(**overrides)


def test_newer_spellings():
    newer = config(
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        torch_dtype=None,
        dtype="float16",
        mlp_layer_types=["dense", "sparse", "sparse"],
        first_k_dense_replace=None,
    )
    assert newer == config(rope_theta=5e5, torch_dtype="float16")


def test_parallel_sizes():
    for tp in (1, 2, 4):
        config().check_parallel(tp)
    config().check_parallel(4, 2)
    with pytest.raises(ConfigError) as info:
        config().check_parallel(3)
    assert "tensor-parallel-size 3 does not divide" in str(info.value)
    assert "num_attention_heads 4, intermediate_size 96, moe_intermediate_size 24; use 1, 2 or 4" in str(
        info.value
    )
    with pytest.raises(
        ConfigError, match=r"decode-context-parallel-size 4 .* tensor-parallel-size 2; use 1 or 2"
    ):
        config().check_parallel(2, 4)
    with pytest.raises(ConfigError, match="use 1 or 2"):
        config(moe_intermediate_size=22).check_parallel(4)
