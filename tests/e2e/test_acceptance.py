"""Acceptance of MTP drafts on the bundled checkpoint, against the figures of its README.

Faults in the MTP layer (another norm, stale or missing KV, the target's selection) never change a
stream; they show here and only here.
"""

import json

import pytest

from actors.inline_group import InlineGroup
from tests.support.groups import TINY_DSA, group_config, load_tokenizer, request, run

# Share of verifies in which at least 1 / 2 / 3 drafts hold, greedy, k = 3 (README of the checkpoint).
NUM_DRAFTS = 3
HELD_OUT_TEXT = [0.84, 0.74, 0.66]
HELD_OUT_QUESTIONS = [0.63, 0.43, 0.31]


def _acceptance(prompts, *, max_tokens: int, ignore_eos: bool = False, **config) -> list[float]:
    """Share of verifies in which at least 1 / 2 / 3 drafts hold.

    As in the README's measurement, a verify counts if its anchor and all its drafts lie inside the
    finished sequence: near the end fewer tokens than drafts are left.
    """
    group = InlineGroup(
        group_config(
            dtype="float32",
            kv_cache_dtype="float32",
            num_speculative_tokens=NUM_DRAFTS,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            **config,
        )
    )
    requests = [
        request(str(i), prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        for i, prompt in enumerate(prompts)
    ]
    collected = run(group, requests)
    group.close()
    held, num_verifies = [0] * NUM_DRAFTS, 0
    for stream in collected.values():
        emitted = 1  # the prompt's last row yields the first anchor
        for update in stream.updates[1:]:
            if emitted - 1 + NUM_DRAFTS < len(stream.token_ids):
                num_verifies += 1
                for i in range(len(update.token_ids) - 1):
                    held[i] += 1
            emitted += len(update.token_ids)
    return [count / num_verifies for count in held]


def _held_out(kind: str) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer()
    rows = json.loads((TINY_DSA / "heldout_prompts.json").read_text())[kind]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    if kind == "text":
        return [(0, *ids(passage)[:96]) for _, passage in rows]
    return [(0, 4, *ids(question), 5) for question, _ in rows]


@pytest.mark.slow
def test_text_is_drafted_as_well_as_measured():
    measured = _acceptance(_held_out("text"), max_tokens=128)
    assert measured == pytest.approx(HELD_OUT_TEXT, abs=0.03)


def test_questions_are_drafted_as_well_as_measured():
    measured = _acceptance(_held_out("chat"), max_tokens=48)
    assert measured == pytest.approx(HELD_OUT_QUESTIONS, abs=0.03)


def test_sharding_and_chunks_cost_no_acceptance():
    """The MTP layer's KV is complete, whichever rank owns it and however the prompt was cut."""
    prompts = _held_out("text")[:24]
    plain = _acceptance(prompts, max_tokens=48, ignore_eos=True)
    cut = _acceptance(
        prompts,
        max_tokens=48,
        ignore_eos=True,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=4,
    )
    assert cut == pytest.approx(plain, abs=0.03)
