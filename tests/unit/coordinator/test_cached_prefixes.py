"""The prefix cache over the fake shard: what is found, published, kept and given away."""

import hashlib

import pytest

from actors.coordinator.blocks import BlockManager
from actors.coordinator.prefix_cache import PrefixCache
from actors.messages import RowKind
from actors.requests import SequenceKey
from cluster.config import EngineArgs
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import anti_oracle, oracle, stream

BLOCK = 4


def cached(group: Group, request_id: str) -> int:
    return group.updates_of(request_id)[-1].num_cached_tokens


def submit_and_run(group: Group, request_id: str, prompt, **params) -> None:
    params.setdefault("max_tokens", 5)
    group.coordinator.submit(request(request_id, prompt, **params))
    group.run()
    group.check_blocks()
    assert group.tokens(request_id) == stream(prompt, params.get("seed", 5), params["max_tokens"])


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["xxhash", "sha256"])
@pytest.mark.parametrize("k", [0, 3])
def test_full_blocks_of_a_prompt_are_found(in_flight, algorithm, k) -> None:
    group = Group(
        group_config(prefix_caching_hash_algo=algorithm, num_speculative_tokens=k),
        max_steps_in_flight=in_flight,
    )
    prompt = list(range(50))
    submit_and_run(group, "first", prompt)
    assert cached(group, "first") == 0
    for n in (1, 3, 4, 5, 7, 8, 9, 48, 49, 50):
        num_sent = len(group.sent)
        submit_and_run(group, f"{n}", prompt[:n], seed=n)
        num_hit = n // BLOCK * BLOCK
        assert cached(group, f"{n}") == min(num_hit, n - 1)
        chunk = group.sent[num_sent]
        assert chunk.ids.tolist() == prompt[max(num_hit - 1, 0) : n]
        assert chunk.readonly.tolist() == [num_hit > 0]
        assert chunk.start.tolist() == [max(num_hit - 1, 0)]


def test_one_other_token_ends_the_common_beginning() -> None:
    group = Group()
    submit_and_run(group, "first", list(range(20)))
    for i, expected in [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (19, 16)]:
        prompt = list(range(20))
        prompt[i] = 90
        submit_and_run(group, f"{i}", prompt)
        assert cached(group, f"{i}") == expected


def test_salts_share_nothing_with_each_other() -> None:
    group = Group()
    found = []
    for i, salt in enumerate([None, "", "a", "b", "a", None, ""]):
        submit_and_run(group, f"{i}", list(range(9)), cache_salt=salt)
        found.append(cached(group, f"{i}"))
    assert found == [0, 0, 0, 0, 8, 8, 8]


def test_switched_off_nothing_is_found() -> None:
    group = Group(group_config(enable_prefix_caching=False))
    for name in "ab":
        submit_and_run(group, name, list(range(20)))
        assert cached(group, name) == 0
    assert not group.coordinator._blocks._hash_of


def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_anew_but_published() -> None:
    group = Group()
    submit_and_run(group, "a", list(range(20)), prompt_logprobs=0)
    submit_and_run(group, "b", list(range(20)), prompt_logprobs=0)
    assert (cached(group, "a"), cached(group, "b")) == (0, 0)
    assert len(group.updates_of("b")[0].prompt_logprobs) == 19
    submit_and_run(group, "c", list(range(20)))
    assert cached(group, "c") == 19


def test_requests_running_together_hold_the_same_blocks() -> None:
    group = Group()
    prompt = list(range(16))
    group.coordinator.submit(request("a", prompt, max_tokens=30))
    group.send()
    group.report()
    used = group.coordinator.stats().num_used_blocks
    group.coordinator.submit(request("b", prompt, max_tokens=30, seed=6))
    group.send()
    group.check_blocks()
    assert group.coordinator.stats().num_used_blocks <= used + 1  # a's drafts
    group.report()
    group.coordinator.abort([SequenceKey("a")])
    group.check_blocks()
    group.run()
    assert group.tokens("b") == stream(prompt, 6, 30)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_accepted_in_a_step_are_not_published_by_it(in_flight) -> None:
    """Their MTP entries, and the last one's KV, are computed by the next step."""
    group = Group(draft=oracle, max_steps_in_flight=in_flight)
    prompt = list(range(3))
    group.coordinator.submit(request("r", prompt, max_tokens=60))
    while group.coordinator.has_work:
        while group.send():
            pass
        committed = {r.request.request_id: len(r.tokens) for r in group.coordinator._scheduler.running}
        group.report()
        published = len(group.coordinator._blocks._hash_of)
        if "r" in committed:
            assert published * BLOCK <= committed["r"]
    assert published == (3 + 60 - 1) // BLOCK


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_a_draft_in_a_blocks_last_slot_is_not_published(prompt_len) -> None:
    """Every draft is wrong, so whatever the last slot held between two steps was a rejected token."""
    group = Group(draft=anti_oracle, config=group_config(num_speculative_tokens=BLOCK))
    prompt = list(range(prompt_len))
    submit_and_run(group, "first", prompt, max_tokens=20)
    whole = [*prompt, *stream(prompt, 5, 20)]
    for n in range(prompt_len, len(whole)):
        # The fake shard notices KV that was computed after other tokens.
        submit_and_run(group, f"{n}", whole[:n], max_tokens=3)
        assert cached(group, f"{n}") > 0 or n < BLOCK


def test_after_rows_fell_out_nothing_more_is_published() -> None:
    """The MTP layer has no entries of what was skipped: others would read holes."""
    wanted = [3]
    group = Group(group_config(num_kv_blocks=200), draft=oracle, draft_policy=lambda _request: wanted[0])
    group.coordinator.submit(request("r", [1, 2, 3], max_tokens=120))
    for k, num_steps in [(3, 3), (0, 40), (3, 100)]:
        wanted[0] = k
        for _ in range(num_steps):
            if group.send():
                group.report()
    assert group.shard.num_skipped_fills == 1
    whole = [1, 2, 3, *stream([1, 2, 3], 5, 120)]
    submit_and_run(group, "next", whole[:100], max_tokens=9)
    assert 0 < cached(group, "next") < 20


def test_a_short_stretch_without_drafts_is_published_after_the_next_fill() -> None:
    wanted = [0]
    group = Group(draft=oracle, draft_policy=lambda _request: wanted[0])
    group.coordinator.submit(request("r", [1, 2, 3], max_tokens=60))
    for _ in range(20):
        group.send()
        group.report()
    assert len(group.coordinator._blocks._hash_of) == 0
    wanted[0] = 3
    group.send()
    group.report()
    assert len(group.coordinator._blocks._hash_of) == (3 + 20) // BLOCK
    group.run()


def test_the_least_recently_used_block_goes_first_and_blank_ones_before_it() -> None:
    group = Group(group_config(num_kv_blocks=8, num_speculative_tokens=0))
    submit_and_run(group, "a", [1] * 8, max_tokens=1)  # 2 blocks each, kept
    submit_and_run(group, "b", [2] * 8, max_tokens=1)
    submit_and_run(group, "a again", [1] * 8, max_tokens=1)
    submit_and_run(group, "c", [3] * 16, max_tokens=1)  # the 4 blank blocks
    for name, prompt in [("a", [1] * 8), ("b", [2] * 8)]:
        submit_and_run(group, f"{name} kept", prompt, max_tokens=1)
        assert cached(group, f"{name} kept") == 7
    submit_and_run(group, "d", [4] * 16, max_tokens=1)  # c's, now the oldest
    submit_and_run(group, "b still", [2] * 8, max_tokens=1)
    assert cached(group, "b still") == 7
    submit_and_run(group, "c gone", [3] * 16, max_tokens=1)
    assert cached(group, "c gone") == 0


def test_a_restart_forgets_everything() -> None:
    group = Group()
    submit_and_run(group, "a", list(range(20)))
    group.restart(1)
    submit_and_run(group, "b", list(range(20)))
    assert cached(group, "b") == 0


def test_a_hit_in_the_same_step_as_a_verify() -> None:
    """A chunk that begins with a read-only row stands behind the verifies as any other."""
    group = Group(group_config(max_num_seqs=2))
    submit_and_run(group, "a", list(range(12)))
    group.coordinator.submit(request("long", [7] * 5, max_tokens=40))
    group.send()
    group.report()
    group.coordinator.submit(request("warm", list(range(14)), max_tokens=5))
    group.send()
    assert group.sent[-1].kind.tolist() == [RowKind.VERIFY, RowKind.FINAL_CHUNK]
    assert group.sent[-1].readonly.tolist() == [0, 1]
    group.run()
    assert group.tokens("warm") == stream(list(range(14)), 5, 5)


def test_no_setting_is_needed_to_be_safe_from_prompts_made_to_collide():
    assert group_config().prefix_caching_hash_algo == "sha256"
    assert EngineArgs().prefix_caching_hash_algo == "sha256"
    blocks = BlockManager(num_blocks=4, tokens_per_block=BLOCK)
    cache = PrefixCache(blocks, is_on=True, algorithm="sha256")
    assert cache._digest(b"tokens") == hashlib.sha256(b"tokens").digest()
