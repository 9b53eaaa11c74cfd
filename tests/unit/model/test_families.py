"""Every family, in every shape that releases come in, on one to four shards, against two references.

transformers in float32 gives logits and greedy tokens (before an indexer near-tie); the plain float64 model
gives all of that once more without ties, and the MTP modules.
"""

from typing import Any

import pytest
import torch

from tests.support.model_ranks import Rank, run_ranks
from tests.support.model_rows import Chunk
from tests.support.naive_model import NaiveModel
from tests.support.tiny_models import FAMILIES, write_tiny_model
from tests.support.transformers_reference import Reference

LENGTH = 64
"""Four times index_topk."""

YARN = {
    "type": "yarn",
    "factor": 8,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
UNEQUAL_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 4}
PLAIN_YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}


def newer_rope(scaling: dict[str, Any], theta: float) -> dict[str, Any]:
    """The same as `rope_parameters`."""
    fields = {name: value for name, value in scaling.items() if name != "type"}
    return {"rope_parameters": {**fields, "rope_type": "yarn", "rope_theta": theta}}


def yarn(family: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """In the spelling of the family's releases."""
    return newer_rope(scaling, 1e6) if family == "glm_moe_dsa" else {"rope_scaling": scaling}


SHAPES: dict[str, dict[str, Any]] = {
    "groups": {},
    "one group": {"n_group": 1, "topk_group": 1},
    "no dense layer": {"first_k_dense_replace": 0},
    "three dense layers": {"first_k_dense_replace": 3},
    "no shared expert": {"n_shared_experts": 0},
    "two shared experts, plain weights": {"n_shared_experts": 2, "norm_topk_prob": False},
    "tied embeddings": {"tie_word_embeddings": True},
    "two MTP modules": {"num_nextn_predict_layers": 2},
    "three MTP modules": {"num_nextn_predict_layers": 3},
    "no MTP module": {"num_nextn_predict_layers": 0},
    "odd sizes": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "vocab_size": 97,
        "intermediate_size": 67,
        "moe_intermediate_size": 21,
    },
    "other eps": {"rms_norm_eps": 1e-4},
}
ONLY: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": {
        "no query latent": {"q_lora_rank": None},
        "halves": {"rope_interleave": False},
        "no query latent, halves": {"q_lora_rank": None, "rope_interleave": False},
    },
    "deepseek_v32": {},
    "glm_moe_dsa": {
        "indexer_types": {"indexer_types": ["full", "shared", "full", "shared"]},
        "index_topk_pattern": {"index_topk_pattern": "FSSF"},
        "index_topk_freq": {"index_topk_freq": 2},
        "index_topk_freq and offset": {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    },
}
CASES = {
    (family, name): overrides
    for family in FAMILIES
    for name, overrides in {
        **SHAPES,
        **ONLY[family],
        "yarn": yarn(family, YARN),
        "unequal yarn": yarn(family, UNEQUAL_YARN),
        "plain yarn": yarn(family, PLAIN_YARN),
    }.items()
}
QUICK = {
    ("deepseek_v3", "no query latent, halves"),
    ("deepseek_v3", "unequal yarn"),
    ("deepseek_v3", "two MTP modules"),
    ("deepseek_v32", "odd sizes"),
    ("deepseek_v32", "yarn"),
    ("glm_moe_dsa", "index_topk_pattern"),
    ("glm_moe_dsa", "index_topk_freq"),
    ("glm_moe_dsa", "other eps"),
}
PARAMETERS = [
    pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in CASES
]
TOPOLOGIES = [(1, 1, False), (2, 2, False), (4, 2, True)]
"""Shards, DCP group, expert parallelism."""


def token_ids(seed: int) -> list[int]:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=PARAMETERS)
def path(request, tmp_path):
    family, _ = request.param
    return write_tiny_model(tmp_path, family, **CASES[request.param])


def run(path, ids, topology, dtype):
    """Logits of every row, in three chunks, and the states of every MTP module over the rows that it has."""
    tp_size, dcp_size, expert_parallel = topology

    def on_rank(tp, dcp):
        num_modules = NaiveModel(path).config["num_nextn_predict_layers"]
        rank = Rank(path, dtype, tp=tp, dcp=dcp, num_mtp_layers=num_modules, expert_parallel=expert_parallel)
        chunks = [(0, 20), (20, 1), (21, len(ids) - 21)]
        h = torch.cat([rank.forward([Chunk(0, at, n)], ids[at : at + n]) for at, n in chunks])
        states, previous = [], h
        for module in range(num_modules):
            first = module + 1
            previous = rank.mtp_forward(
                [Chunk(0, first, len(ids) - first)], ids[first:], previous[:-1], module
            )
            states.append(previous)
        with torch.inference_mode():
            return rank.model.logits(h), states

    results = run_ranks(tp_size, dcp_size, 1, on_rank)
    vocab_size = NaiveModel(path).config["vocab_size"]
    logits = torch.cat([part for part, _ in results], dim=-1)
    assert torch.all(logits[:, vocab_size:] == float("-inf"))
    return logits[:, :vocab_size], results[0][1]


@pytest.mark.slow
@pytest.mark.product(14)
def test_float32_equals_transformers(path):
    reference = Reference(path)
    reference.follow_the_config_in_latent_norms()
    ids = token_ids(3)
    theirs, num_decided = reference.logits(ids)
    assert num_decided >= 40, "a near-tie leaves too little to compare; choose another seed"
    for topology in TOPOLOGIES:
        ours, _ = run(path, ids, topology, torch.float32)
        assert (ours - theirs)[:num_decided].abs().max() <= 1e-4, topology
        assert torch.equal(ours[:num_decided].argmax(-1), theirs[:num_decided].argmax(-1)), topology


@pytest.mark.product(14)
def test_float64_equals_the_formulas(path):
    naive, ids = NaiveModel(path), token_ids(4)
    h = naive.hidden(ids)
    logits = naive.logits(h)
    states, previous = [], h
    for module in range(naive.config["num_nextn_predict_layers"]):
        previous = naive.mtp(module, ids[module + 1 :], previous[:-1], module + 1)
        states.append(previous)
    for topology in TOPOLOGIES:
        our_logits, our_states = run(path, ids, topology, torch.float64)
        assert (our_logits - logits).abs().max() <= 1e-9, topology
        assert len(our_states) == len(states)
        for ours, theirs in zip(our_states, states, strict=True):
            assert (ours - theirs).abs().max() <= 1e-9, topology
