"""Every sampling parameter: one stream for every k, topology, batch and preemption, and the right tokens.

In float64, as tests/e2e/test_one_stream.py. Streams of one rank without drafts are the yardstick; those
without randomness are compared with transformers' logits, edited one row at a time.
"""

import pytest
import torch

from actors.inline_group import InlineGroup
from actors.requests import Request
from tests.support.groups import EOS, group_config, load_tokenizer, request, run, text_prompts
from tests.support.reference import reference_model
from tests.support.sampling_reference import edited_logits

NEW_TOKENS = 16
PROMPT_LENGTHS = [5, 40, 70]

# What each setting asks for beyond a temperature. bad_words are token sequences of the plain streams.
RULES: dict[str, dict] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.3},
    "repeat-more": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": {11: 15.0, 12: 14.5, 500: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(2, 400, 3))},
    "min-tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 30.0}},
    "all": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {11: 3.0, EOS: 4.0},
        "allowed_token_ids": tuple(t for t in range(6144) if t % 5),
        "min_tokens": 4,
        "ignore_eos": False,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


def _with_bad_words(req: Request, words: tuple[tuple[int, ...], ...]) -> Request:
    return Request(**{f: getattr(req, f) for f in Request.__struct_fields__} | {"bad_words": words})


def _plain(config: dict | None = None) -> dict[str, list[int]]:
    group = InlineGroup(group_config(**config or {}))
    prompts = text_prompts(PROMPT_LENGTHS)
    requests = [request(f"p{i}", p, max_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
    collected = run(group, requests)
    group.close()
    return {name: c.token_ids for name, c in collected.items()}


def _requests(plain: dict[str, list[int]]) -> list[Request]:
    prompts = text_prompts(PROMPT_LENGTHS)
    requests = []
    for index, (name, rules) in enumerate(RULES.items()):
        prompt = prompts[index % len(prompts)]
        greedy = {key: value for key, value in rules.items() if key not in ("top_k", "top_p", "min_p")}
        requests.append(request(f"greedy-{name}", prompt, max_tokens=NEW_TOKENS, **greedy))
        requests.append(
            request(
                f"sampled-{name}", prompt, max_tokens=NEW_TOKENS, temperature=1.0, seed=50 + index, **rules
            )
        )
    for i, prompt in enumerate(prompts):
        # One and three tokens that the plain stream would have drawn.
        words = ((plain[f"p{i}"][2],), tuple(plain[f"p{i}"][5:8]))
        greedy = request(f"greedy-bad-words-{i}", prompt, max_tokens=NEW_TOKENS)
        sampled = request(f"sampled-bad-words-{i}", prompt, max_tokens=NEW_TOKENS, temperature=0.6, seed=i)
        requests += [_with_bad_words(greedy, words), _with_bad_words(sampled, words)]
    return requests


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return _plain()


@pytest.fixture(scope="module")
def streams(plain) -> dict[str, list[int]]:
    """One rank, no drafts, one request at a time."""
    group = InlineGroup(group_config())
    collected = run(group, _requests(plain), together=False)
    group.close()
    return {name: c.token_ids for name, c in collected.items()}


def _rules_of(req: Request) -> dict:
    params = req.params
    return {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": req.bad_words,
        "min_tokens": params.min_tokens,
        "end_token_ids": (EOS, *params.stop_token_ids),
        "logit_bias": params.logit_bias,
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
    }


@torch.inference_mode()
def test_greedy_tokens_are_the_best_of_the_edited_logits(streams, plain):
    """Teacher forcing: one forward of transformers' float32 model over each whole stream."""
    model = reference_model()
    for req in _requests(plain):
        tokens = streams[req.request_id]
        prompt = req.prompt_token_ids
        logits = (
            model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 :].double()
        )
        for i, token in enumerate(tokens):
            edited = edited_logits(logits[i], prompt, tokens[:i], **_rules_of(req))
            assert edited[token] > -torch.inf
            if req.params.temperature == 0:
                assert edited[token] >= edited.max() - 1e-3, (req.request_id, i)


def test_the_rules_change_the_streams(streams, plain):
    """Else the comparisons would show nothing."""
    for index, name in enumerate(RULES):
        assert streams[f"greedy-{name}"] != plain[f"p{index % len(PROMPT_LENGTHS)}"], name
    for i in range(len(PROMPT_LENGTHS)):
        assert streams[f"greedy-bad-words-{i}"] != plain[f"p{i}"]
    assert len(streams["greedy-min-tokens"]) == 10  # the end is drawn as soon as it may be
    assert streams["greedy-min-tokens"][-1] == EOS


@pytest.mark.product(1)
@pytest.mark.parametrize(
    "config",
    [
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 8},
        {"num_speculative_tokens": 0, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"num_speculative_tokens": 3, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"num_speculative_tokens": 3, "tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        {"num_speculative_tokens": 8, "tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        {"num_speculative_tokens": 3, "max_num_batched_tokens": 33},
        {"num_speculative_tokens": 3, "num_kv_blocks": 48, "block_size": 2},
        {"num_speculative_tokens": 0, "num_kv_blocks": 48, "block_size": 2},
    ],
    ids=lambda c: "-".join(f"{''.join(w[0] for w in name.split('_'))}{value}" for name, value in c.items()),
)
def test_one_stream(streams, plain, config):
    group = InlineGroup(group_config(**config))
    collected = run(group, _requests(plain))
    stats = group.stats()
    group.close()
    assert {name: c.token_ids for name, c in collected.items()} == streams
    if "num_kv_blocks" in config:
        assert stats.num_preemptions > 0
    if config["num_speculative_tokens"]:
        assert sum(stats.accepted) > 0


def test_greedy_ignores_the_seed_and_sampling_does_not():
    prompt = text_prompts([40])[0]
    penalty = {"presence_penalty": 0.5, "max_tokens": 12}
    requests = [request(f"g{seed}", prompt, seed=seed, **penalty) for seed in (1, 2)]
    requests += [
        request(f"s{seed}-{again}", prompt, seed=seed, temperature=1.0, **penalty)
        for seed in (1, 2, 2**63 + 1)
        for again in "ab"
    ]
    group = InlineGroup(group_config(num_speculative_tokens=3))
    tokens = {name: c.token_ids for name, c in run(group, requests).items()}
    group.close()
    assert tokens["g1"] == tokens["g2"]
    sampled = [tokens[f"s{seed}-a"] for seed in (1, 2, 2**63 + 1)]
    assert sampled == [tokens[f"s{seed}-b"] for seed in (1, 2, 2**63 + 1)]
    assert len({tuple(ids) for ids in sampled}) == 3


@pytest.mark.parametrize("k", [0, 3])
def test_ends_with_min_tokens_and_stop_strings(k):
    """A stop string counts from the first token after min_tokens, and never in the prompt."""
    tokenizer = load_tokenizer()
    prompt = text_prompts([40])[0]
    group = InlineGroup(group_config(num_speculative_tokens=k), tokenizer=tokenizer)
    whole = run(group, [request("whole", prompt, max_tokens=24)])["whole"].token_ids
    stop = tokenizer.decode(whole[3:5])[1:]
    assert stop
    first = next(n for n in range(25) if stop in tokenizer.decode(whole[:n]))
    stopped = run(group, [request("stop", prompt, max_tokens=24, stop=(stop,))])["stop"]
    assert stopped.token_ids == whole[:first]
    assert stopped.last.matched_stop == stop
    later = run(group, [request("min", prompt, max_tokens=24, stop=(stop,), min_tokens=first)])["min"]
    assert later.token_ids[:first] == whole[:first]
    assert len(later.token_ids) > first
    # The last text of the prompt and the first of the completion: not a stop.
    across = tokenizer.decode(prompt[-1:])[-1:] + tokenizer.decode(whole[:1])[:1]
    crossing = run(group, [request("across", prompt, max_tokens=3, stop=(across,))])["across"]
    assert crossing.token_ids == whole[:3]
    group.close()
