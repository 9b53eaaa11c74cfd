"""All families through the whole system: one stream whatever the group looks like, and the right drafts.

Random weights with a small residual stream: the next token then hangs mostly on the last one, so that drafts
are accepted and refused in turns. float64, for the reasons of test_one_stream.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.inline_group import InlineGroup
from tests.support.groups import group_config, request, run
from tests.support.naive_model import NaiveModel
from tests.support.recording_group import run_alone
from tests.support.tiny_models import FAMILIES, Weights, write_tiny_model

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "shared selections": ("glm_moe_dsa", {"index_topk_pattern": "FSFS"}),
    "two modules": ("deepseek_v3", {"num_nextn_predict_layers": 2}),
    "two modules, sparse": ("deepseek_v32", {"num_nextn_predict_layers": 2}),
    "three modules, shared selections": (
        "glm_moe_dsa",
        {"num_nextn_predict_layers": 3, "index_topk_pattern": "FSSF"},
    ),
}
QUICK = {"shared selections", "two modules, sparse"}
WEIGHTS = Weights(residual_scale=0.15, mtp_align=0.8)
PROMPT_LENGTHS = [1, 2, 9, 40, 90]
NEW_TOKENS = 24


@pytest.fixture(
    scope="module",
    params=[pytest.param(s, marks=[] if s in QUICK else pytest.mark.slow, id=s) for s in SHAPES],
)
def path(request, tmp_path_factory) -> Path:
    family, overrides = SHAPES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("model"), family, WEIGHTS, **overrides)


def config(path: Path, **overrides: Any):
    values = {"model_path": str(path), "max_model_len": 256, "block_size": 4, "num_kv_blocks": 512}
    return group_config(**values, **overrides)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def requests():
    greedy = [request(f"greedy-{n}", prompt(n), max_tokens=NEW_TOKENS) for n in PROMPT_LENGTHS]
    sampled = [
        request(f"sampled-{n}", prompt(n), max_tokens=NEW_TOKENS, temperature=0.7, seed=n)
        for n in PROMPT_LENGTHS
    ]
    return greedy + sampled


@functools.cache
def plain_streams(path: Path) -> dict[str, list[int]]:
    group = InlineGroup(config(path))
    collected = run(group, requests(), together=False)
    group.close()
    return {name: c.token_ids for name, c in collected.items()}


@pytest.mark.parametrize(
    ("tp", "dcp", "expert_parallel"), [(1, 1, False), (2, 2, False), (4, 2, False), (4, 1, True)]
)
@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_one_stream(path, tp, dcp, expert_parallel, k):
    group = InlineGroup(
        config(
            path,
            num_speculative_tokens=k,
            tensor_parallel_size=tp,
            decode_context_parallel_size=dcp,
            enable_expert_parallel=expert_parallel,
            max_num_batched_tokens=48,
        )
    )
    collected = run(group, requests())
    group.close()
    assert {name: c.token_ids for name, c in collected.items()} == plain_streams(path)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [7, 256])
def test_drafts_are_those_of_the_formulas(path, k, rows):
    """Of every step: after chunks of any size, acceptance of any length, and rejected drafts in the cache."""
    ids = prompt(50)
    asked = request("one", ids, max_tokens=40)
    settings = config(path, num_speculative_tokens=k, max_num_batched_tokens=max(rows, k + 1))
    collected, verifies = run_alone(settings, asked)
    naive = NaiveModel(path)
    sequence = [*ids, *collected.token_ids]
    hidden = naive.hidden(sequence)
    num_held = []
    for verify in verifies:
        known = sequence[: verify.anchor + 1]
        expected = naive.greedy_drafts(known, len(verify.drafts), hidden[: verify.anchor])
        assert verify.drafts == expected
        following = sequence[verify.anchor + 1 :]
        num_held.append(
            next((i for i, d in enumerate(verify.drafts) if following[i : i + 1] != [d]), len(verify.drafts))
        )
    assert len(set(num_held)) > 1, "drafts are all accepted or all refused"
