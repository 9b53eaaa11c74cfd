"""All families through the whole system: one stream whatever the group looks like, and the right drafts.

Random weights with a small residual stream: the next token then hangs mostly on the last one, so that drafts
are accepted and refused in turns. float64, for the reasons of test_one_stream.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.coordinator.draft_policy import StaticDrafts
from actors.inline_group import InlineGroup
from actors.messages import PENDING_CAPACITY
from actors.model.config import ModelConfig
from recipes.tiny_dsa.to_glm import convert
from tests.support.groups import TINY_DSA, group_config, request, run, text_prompts
from tests.support.naive_model import NaiveModel
from tests.support.recording_group import run_in_turn
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


@pytest.mark.product(6)
@pytest.mark.parametrize(
    ("tp", "dcp", "expert_parallel"), [(1, 1, False), (2, 2, False), (4, 2, False), (4, 1, True)]
)
@pytest.mark.parametrize(
    "k", [0, pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
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


@pytest.mark.product(4)
@pytest.mark.parametrize(
    "k", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3, 5]
)
@pytest.mark.parametrize(
    ("rows", "scheduling"), [(7, "sync"), pytest.param(256, "deferred", marks=pytest.mark.slow)]
)
def test_drafts_are_those_of_the_formulas(path, k, rows, scheduling):
    """Of every step: after chunks of any size, any number of held drafts, and a prefix out of the cache."""
    ids = prompt(50)
    settings = config(
        path,
        num_speculative_tokens=k,
        num_mtp_modules=min(k, ModelConfig.from_pretrained(path).num_mtp_layers),
        max_num_batched_tokens=max(rows, k + 1),
        scheduling=scheduling,
    )
    naive = NaiveModel(path)
    runs = run_in_turn(settings, [request(name, ids, max_tokens=40) for name in ("first", "again")])
    assert runs[1][0].last.num_cached_tokens >= 44
    num_held = set()
    for collected, verifies in runs:
        sequence = [*ids, *collected.token_ids]
        hidden = naive.hidden(sequence)
        for verify in verifies:
            if verify.anchor >= len(sequence) - 1:  # sent before the end was known
                continue
            known = sequence[: verify.anchor + 1]
            expected = naive.greedy_drafts(known, len(verify.drafts), hidden[: verify.anchor])
            assert verify.drafts == expected
            num_held.add(verify.num_held)
    assert len(num_held) > 1, "drafts are all accepted or all refused"


@pytest.mark.product(3)
def test_a_long_stretch_without_drafts_forgets_the_oldest_rows(path):
    """More rows than may wait: afterwards module j sees slots from mtp_from + j on, and no hole."""
    ids = prompt(50)
    settings = config(path, num_speculative_tokens=3)
    policy = StaticDrafts(lambda asked: 0 if 60 <= len(asked.tokens) < 110 else 3)
    [(collected, verifies)] = run_in_turn(settings, [request("one", ids, max_tokens=80)], draft_policy=policy)
    after = [v for v in verifies if v.anchor >= 109]
    assert len(verifies) - len(after) > 40
    assert len(after) > 5
    mtp_from = after[0].anchor + 1 - PENDING_CAPACITY
    naive, sequence = NaiveModel(path), [*ids, *collected.token_ids]
    hidden = naive.hidden(sequence)
    for verify in after:
        known, states = sequence[: verify.anchor + 1], hidden[: verify.anchor]
        expected = naive.greedy_drafts(known, len(verify.drafts), states, mtp_from=mtp_from)
        assert verify.drafts == expected


@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_drafts_are_those_of_transformers(tmp_path, monkeypatch, num_modules):
    """`generate(use_mtp=True)` drafts once from each module; both streams are greedy, so they are equal."""
    import transformers
    from transformers.modeling_layers import MtpModel

    path = write_tiny_model(tmp_path, "deepseek_v3", WEIGHTS, num_nextn_predict_layers=num_modules)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    # The class knows only the layer number of the released model, 61, as an MTP layer.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{4 + i}.*" for i in range(num_modules)]
    theirs: dict[int, list[int]] = {}
    forward = MtpModel.forward

    def recording(self, *args, full_input_ids, **kwargs):
        out = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        theirs[full_input_ids.shape[1] - 1] = out[0][0].tolist()
        return out

    monkeypatch.setattr(MtpModel, "forward", recording)
    ids = prompt(50)
    sequence = model.generate(
        torch.tensor([ids]), use_mtp=True, do_sample=False, max_new_tokens=40, eos_token_id=None
    )
    settings = config(path, dtype="float32", kv_cache_dtype="float32", num_speculative_tokens=num_modules)
    [(collected, verifies)] = run_in_turn(settings, [request("one", ids, max_tokens=40)])
    assert collected.token_ids == sequence[0, len(ids) :].tolist()
    full = [v for v in verifies if len(v.drafts) == num_modules]
    assert len(full) >= 10
    assert [v.drafts for v in full] == [theirs[v.anchor] for v in full]


@pytest.fixture(scope="module")
def glm_dialect(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("glm")
    convert(TINY_DSA, target)
    return target


@pytest.mark.parametrize("k", [0, 3])
def test_the_bundled_checkpoint_in_the_dialect_of_glm(glm_dialect, k):
    """The same weights in another family: the same streams, and as many drafts accepted."""
    asked = [request(str(n), p, max_tokens=32) for n, p in enumerate(text_prompts([20, 80, 200]))]
    outcomes = []
    for path in (TINY_DSA, glm_dialect):
        group = InlineGroup(group_config(model_path=str(path), num_speculative_tokens=k))
        collected = run(group, asked)
        stats = group.stats()
        group.close()
        streams = [[update.token_ids for update in collected[r.request_id].updates] for r in asked]
        outcomes.append((streams, stats.num_verifies))
    assert outcomes[0] == outcomes[1]
