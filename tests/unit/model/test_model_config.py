import dataclasses
import json
import math

import pytest

from actors.model.config import ModelConfig
from actors.model.tensors import main_tensor_shapes, parameter_counts
from kernels_integration.errors import CheckpointError, shown
from tests.support.random_checkpoint import BASE_CONFIG

YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
GLM = {"model_type": "glm_moe_dsa"}
DENSE = {"model_type": "deepseek_v3"}


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
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="one JSON object"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    assert ModelConfig.from_pretrained(tmp_path) == config()


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v2", "kimi_k25", None, ["deepseek_v3"]])
def test_unsupported_model_type_lists_the_supported(model_type):
    supported = "deepseek_v3, deepseek_v32, glm_moe_dsa, kimi_k2"
    assert f"model_type {shown(model_type)} is not supported; supported: {supported}" in refusal(
        model_type=model_type
    )


def test_every_wrong_field_is_named_at_once():
    message = refusal(hidden_size=None, q_lora_rank="96", n_group=True, rms_norm_eps=0, norm_topk_prob=1)
    assert "hidden_size is missing; it must be an integer >= 1" in message
    assert "q_lora_rank is '96'; it must be an integer >= 1" in message
    assert "n_group is true" in message
    assert "rms_norm_eps is 0; it must be a number > 0" in message
    assert "norm_topk_prob is 1; it must be true or false" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope type 'llama3'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be null or a JSON object"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn's factor is null; it must be a number >= 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "yarn's factor is 0.5; it must be a number >= 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "yarn's factor 1e+308 times original_max"),
        ({"rope_scaling": {"type": "yarn", "factor": 10**400}}, "it must be a number >= 1"),
        ({"rope_theta": 10**400}, "it must be a number > 1"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta is 1; it must be a number > 1"),
        ({"rope_scaling": {"factor": 4}}, "the rotary embedding has factor but no rope_type"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "the rotary embedding has full_attention but no rope_type",
        ),
        ({"rope_scaling": {**YARN, "mscale": -1}}, "yarn's mscale is -1; it must be a number >= 0"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "yarn's truncate is 1; it must be true or false"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "yarn's original_max_position_embeddings is 0; it must be an integer >= 1",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8}},
            "rope_scaling and rope_parameters say different things; keep one of them",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"q_lora_rank": None}, "q_lora_rank is missing; it must be an integer >= 1"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types is ['full', 'shared']; it must be 3 times"),
        ({"indexer_types": ["full", "half", "full"]}, "it must be 3 times"),
        ({"indexer_types": [["full"], {}, "full"]}, "it must be 3 times"),
        ({"indexer_types": 3}, "indexer_types is 3; it must be 3 times"),
        ({"index_topk_pattern": "FSX"}, "index_topk_pattern is 'FSX'; it must be 3 times"),
        ({"index_topk_pattern": "SFF"}, "index_topk_pattern 'SFF': layer 0 would share a selection"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "layer 0 would share a selection"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0; it must be an integer >= 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size is null"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: 'sigmoid'"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1; it must be an integer >= 0"),
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
        (
            {"mlp_layer_types": ["dense", "sparse"]},
            "mlp_layer_types has 2 entries; it must have one for each",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be at most 1024"),
        ({"hidden_size": 10**12}, "hidden_size 1000000000000 must be at most 1048576"),
        ({"n_routed_experts": 2**20, "n_group": 1, "topk_group": 1}, "at most 65536 are supported"),
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


def test_families_differ_by_data():
    dense, sparse, glm = config(**DENSE), config(), config(**GLM)
    assert [c.has_indexer for c in (dense, sparse, glm)] == [False, True, True]
    assert [c.indexer_rope_interleave for c in (dense, sparse, glm)] == [False, False, True]
    assert not config(**GLM, indexer_rope_interleave=False).indexer_rope_interleave
    assert dense.index_layers(4) == ()
    assert sparse.index_layers(4) == (0, 1, 2, 3)
    assert config(model_type="kimi_k2") == dataclasses.replace(dense, model_type="kimi_k2")
    no_index_fields = {name: None for name in BASE_CONFIG if name.startswith("index_")}
    assert config(**DENSE, **no_index_fields) == dense
    assert "index_topk is missing" in refusal(**no_index_fields)


def test_queries_without_a_latent():
    assert config(**DENSE, q_lora_rank=None).q_lora_rank is None
    absent = {name: value for name, value in BASE_CONFIG.items() if name != "q_lora_rank"}
    with pytest.raises(CheckpointError, match="q_lora_rank is missing"):
        ModelConfig.from_dict({**absent, **DENSE})


def test_no_shared_experts():
    assert config(n_shared_experts=None).n_shared_experts == config(n_shared_experts=0).n_shared_experts == 0
    absent = {name: value for name, value in BASE_CONFIG.items() if name != "n_shared_experts"}
    with pytest.raises(CheckpointError, match="n_shared_experts is missing"):
        ModelConfig.from_dict(absent)


FSSF = ("full", "shared", "shared", "full")


@pytest.mark.parametrize(
    ("spelling", "types"),
    [
        ({}, ("full",) * 4),
        ({"indexer_types": list(FSSF)}, FSSF),
        ({"index_topk_pattern": "FSSF"}, FSSF),
        ({"index_topk_pattern": list(FSSF)}, FSSF),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, FSSF),
        ({"index_topk_freq": 2}, ("full", "full", "shared", "full")),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, ("full", "full", "full", "shared")),
        # The more explicit spelling goes first.
        ({"indexer_types": list(FSSF), "index_topk_pattern": "FFFF", "index_topk_freq": 2}, FSSF),
        ({"index_topk_pattern": "FSSF", "index_topk_freq": 2}, FSSF),
    ],
)
def test_shared_selections(spelling, types):
    loaded = config(**GLM, num_hidden_layers=4, **spelling)
    assert loaded.indexer_types == types
    # MTP layers always run an indexer of their own.
    assert loaded.index_layers(5) == (*(i for i in range(4) if types[i] == "full"), 4)
    shapes = main_tensor_shapes(loaded)
    assert [f"model.layers.{i}.self_attn.indexer.wk.weight" in shapes for i in range(4)] == [
        kind == "full" for kind in types
    ]


def test_yarn():
    """DeepSeek-V3's own values: m(40, 1) cancels in cos and sin and is squared in the score."""
    released = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }
    loaded = config(rope_scaling=released, max_position_embeddings=163840)
    m = 0.1 * math.log(40) + 1
    assert loaded.rope_scaling.embedding_factor == 1.0
    assert loaded.mla_scale == pytest.approx(32**-0.5 * m * m)
    assert loaded.max_model_len == 163840
    newer = {**released, "rope_type": "yarn", "rope_theta": 10000.0}
    del newer["type"]
    assert loaded == config(rope_theta=None, rope_parameters=newer, max_position_embeddings=163840)


def test_yarn_defaults_and_lengths():
    plain = config(rope_scaling=YARN, max_position_embeddings=256)
    m = 0.1 * math.log(4) + 1
    assert plain.rope_scaling.embedding_factor == pytest.approx(m)
    assert plain.mla_scale == 32**-0.5
    assert (plain.rope_scaling.beta_fast, plain.rope_scaling.beta_slow) == (32.0, 1.0)
    assert plain.rope_scaling.truncate
    # Either length may be the stated one; without an original length the stated one is it.
    assert plain.max_model_len == config(rope_scaling=YARN, max_position_embeddings=64).max_model_len == 256
    assert config(rope_scaling={"type": "yarn", "factor": 4}).max_model_len == 4 * 256
    outside = config(rope_scaling=YARN, original_max_position_embeddings=32)
    assert outside.rope_scaling.original_max_position_embeddings == 32
    given = config(rope_scaling={**YARN, "attention_factor": 0.9, "mscale": 2, "mscale_all_dim": 0.5})
    assert given.rope_scaling.embedding_factor == 0.9
    assert given.rope_scaling.score_factor == pytest.approx((0.05 * math.log(4) + 1) ** 2)
