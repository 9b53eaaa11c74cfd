"""Every reported log probability is the teacher-forced value of transformers' model."""

import pytest
import torch

from actors.inline_group import InlineGroup
from tests.support.groups import group_config, request, run, text_prompts
from tests.support.reference import reference_model

LENGTHS = [1, 5, 40, 70]
NEW_TOKENS = 12
TOLERANCE = 1e-4

REQUESTS = {
    "greedy": {"logprobs": 5, "prompt_logprobs": 3},
    "hot": {"logprobs": 0, "temperature": 1.3, "top_p": 0.9},
    "unasked": {"temperature": 1.0},
    "penalised": {"logprobs": 2, "prompt_logprobs": 0, "presence_penalty": 1.5, "logit_bias": {7: 5.0}},
    "prompt-only": {"prompt_logprobs": 6, "temperature": 0.7},
}


def _requests():
    prompts = text_prompts(LENGTHS)
    return [
        request(f"{name}-{len(prompt)}", prompt, seed=i, max_tokens=NEW_TOKENS, **params)
        for i, prompt in enumerate(prompts)
        for name, params in REQUESTS.items()
    ]


@torch.inference_mode()
def _reference(tokens: list[int]) -> torch.Tensor:
    logits = reference_model()(torch.tensor([tokens]), use_cache=False).logits[0].double()
    return logits.log_softmax(-1)


def _check(entries, tokens, rows: torch.Tensor, num_top: int) -> None:
    assert [entry.token_id for entry in entries] == list(tokens)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        assert len(entry.top) == num_top
        best = row.topk(num_top).values.tolist() if num_top else []
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        for token, value in entry.top:
            assert value == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"num_speculative_tokens": 3, "rejection_sampling": "standard", "scheduling": "deferred"},
        {"num_speculative_tokens": 5, "max_num_batched_tokens": 17, "block_size": 2, "num_kv_blocks": 44},
    ],
    ids=["k0", "k3", "tp2", "standard", "chunks-and-preemption"],
)
def test_log_probabilities_are_the_teacher_forced_ones(config):
    """Whichever way a token came: from a prompt's last row, as an accepted draft, or in a draft's place."""
    group = InlineGroup(group_config(**{"dtype": "float32", "kv_cache_dtype": "float32"} | config))
    requests = _requests()
    collected = run(group, requests)
    stats = group.stats()
    group.close()
    if config["num_speculative_tokens"]:
        assert 0 < sum(stats.accepted) < sum(stats.proposed)
    if "num_kv_blocks" in config:
        assert stats.num_preemptions > 0
    for req in requests:
        updates = collected[req.request_id].updates
        tokens, prompt = collected[req.request_id].token_ids, req.prompt_token_ids
        rows = _reference([*prompt, *tokens])
        found = [entry for update in updates for entry in update.logprobs]
        if req.params.logprobs is None:
            assert found == []
        else:
            _check(found, tokens, rows[len(prompt) - 1 : -1], req.params.logprobs)
        assert all(not update.prompt_logprobs for update in updates[1:])
        if req.params.prompt_logprobs is None:
            assert updates[0].prompt_logprobs == ()
        else:
            _check(
                updates[0].prompt_logprobs, prompt[1:], rows[: len(prompt) - 1], req.params.prompt_logprobs
            )


def test_the_whole_vocabulary():
    """What -1 becomes: as many alternatives as there are tokens; their probabilities sum to one."""
    group = InlineGroup(group_config(num_speculative_tokens=3))
    prompt = text_prompts([20])[0]
    whole = request("whole", prompt, max_tokens=4, logprobs=6144, prompt_logprobs=6144)
    updates = run(group, [whole, request("other", prompt, max_tokens=4, logprobs=1)])["whole"].updates
    group.close()
    entries = [entry for update in updates for entry in (*update.prompt_logprobs, *update.logprobs)]
    assert len(entries) == 19 + 4
    for entry in entries:
        assert sorted(token for token, _ in entry.top) == list(range(6144))
        assert float(torch.tensor([v for _, v in entry.top]).double().exp().sum()) == pytest.approx(
            1, abs=1e-4
        )
