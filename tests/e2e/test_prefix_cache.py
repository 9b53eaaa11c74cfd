"""The prefix cache with the real model: a stream that begins from cached KV is the one computed anew."""

import msgspec
import pytest

from actors.inline_group import InlineGroup
from actors.messages import StepInput
from actors.requests import Request
from tests.support.groups import Collected, group_config, request, run, text_prompts

NEW_TOKENS = 10
BLOCK = 8
TEXT = text_prompts([120])[0]


class Watched:
    """A group whose messages a test may read."""

    def __init__(self, **config) -> None:
        self.group = InlineGroup(group_config(**{"block_size": BLOCK, "num_kv_blocks": 256} | config))
        self.sent: list[StepInput] = []
        send = self.group._shards.send

        def recording(step: StepInput) -> None:
            self.sent.append(step)
            send(step)

        self.group._shards.send = recording  # type: ignore[method-assign]

    def run(self, *requests: Request) -> dict[str, Collected]:
        return run(self.group, requests)

    def chunk_rows(self) -> int:
        """Prompt rows computed since the last call."""
        rows = sum(len(m.ids) for m in self.sent)
        self.sent.clear()
        return rows


def _both(prompt, **params) -> list[Request]:
    """A greedy and a sampled request."""
    return [
        request(f"greedy-{len(prompt)}", prompt, max_tokens=NEW_TOKENS, **params),
        request(f"sampled-{len(prompt)}", prompt, max_tokens=NEW_TOKENS, temperature=1.0, seed=3, **params),
    ]


@pytest.fixture(scope="module")
def cold() -> dict[str, list[int]]:
    """Streams of every beginning of the text, computed without cache, drafts or company."""
    group = InlineGroup(group_config(enable_prefix_caching=False))
    requests = [r for n in sorted({*_cuts(1), *_cuts(2), *_cuts(4), 120}) for r in _both(TEXT[:n])]
    streams = {name: c.token_ids for name, c in run(group, requests).items()}
    group.close()
    return streams


def _cuts(dcp: int) -> list[int]:
    """Around the first, second and a later block boundary."""
    size = BLOCK * dcp
    return [n * size + d for n in (1, 2, 3) for d in (-1, 0, 1)]


@pytest.mark.product(1)
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
@pytest.mark.parametrize(
    ("tp", "dcp", "interleave", "k"),
    [(1, 1, 1, 0), (1, 1, 1, 3), (2, 2, 1, 3), (2, 2, 8, 3), (4, 4, 2, 3), (4, 2, 4, 8)],
)
def test_warm_streams_equal_cold_ones(cold, scheduling, tp, dcp, interleave, k) -> None:
    """Each beginning of the text, longest first: all that follow find its blocks, twice."""
    watched = Watched(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        num_speculative_tokens=k,
        scheduling=scheduling,
    )
    size = BLOCK * dcp
    watched.run(request("first", TEXT, max_tokens=2))
    watched.chunk_rows()
    for n in _cuts(dcp):
        for r in _both(TEXT[:n]):
            collected = watched.run(r)[r.request_id]
            assert collected.token_ids == cold[r.request_id]
            num_hit = n // size * size
            assert watched.chunk_rows() == n - max(num_hit - 1, 0)
            assert collected.last.num_cached_tokens == min(num_hit, n - 1)
    watched.group.close()


def test_drafts_are_as_good_after_a_hit() -> None:
    """The MTP layer's KV is cached too: a warm request accepts what the cold one accepted."""
    watched = Watched(num_speculative_tokens=3, scheduling="sync")
    cold = watched.run(request("cold", TEXT[:96], max_tokens=40))["cold"].last
    warm = watched.run(request("warm", TEXT[:96], max_tokens=40))["warm"].last
    watched.group.close()
    assert warm.num_cached_tokens == 95
    assert (warm.num_draft_tokens, warm.num_accepted_tokens) == (
        cold.num_draft_tokens,
        cold.num_accepted_tokens,
    )
    assert cold.num_accepted_tokens > 0


@pytest.mark.parametrize("k", [0, 3])
def test_completions_are_found_too(cold, k) -> None:
    """A second turn: prompt and completion of the first are its beginning, but for what is not complete."""
    watched = Watched(num_speculative_tokens=k)
    first = watched.run(request("greedy-24", TEXT[:24], max_tokens=24))["greedy-24"]
    second = (*TEXT[:24], *first.token_ids, *TEXT[24:30])
    warm = watched.run(request("second", second, max_tokens=NEW_TOKENS))["second"]
    watched.group.close()
    # The last step's tokens have no KV, and what it verified is published up to its anchor only.
    assert warm.last.num_cached_tokens in (32, 40)
    anew = InlineGroup(group_config(enable_prefix_caching=False))
    expected = run(anew, [request("second", second, max_tokens=NEW_TOKENS)])["second"]
    anew.close()
    assert warm.token_ids == expected.token_ids


@pytest.mark.parametrize("k", [0, 3])
def test_requests_that_share_half_a_block_do_not_share_it(cold, k) -> None:
    watched = Watched(num_speculative_tokens=k)
    half = TEXT[: 2 * BLOCK + BLOCK // 2]
    other = (*half, *reversed(TEXT[20:40]))
    watched.run(request("first", (*half, *TEXT[40:60]), max_tokens=NEW_TOKENS))
    warm = watched.run(request("other", other, max_tokens=NEW_TOKENS))["other"]
    watched.group.close()
    assert warm.last.num_cached_tokens == 2 * BLOCK
    anew = InlineGroup(group_config(enable_prefix_caching=False))
    expected = run(anew, [request("other", other, max_tokens=NEW_TOKENS)])["other"]
    anew.close()
    assert warm.token_ids == expected.token_ids


def test_another_salt_shares_nothing(cold) -> None:
    watched = Watched(num_speculative_tokens=3)
    plain = request("greedy-24", TEXT[:24], max_tokens=NEW_TOKENS)
    for salt, num_cached in [(None, 0), ("a", 0), ("b", 0), ("a", 23), (None, 23)]:
        collected = watched.run(msgspec.structs.replace(plain, cache_salt=salt))["greedy-24"]
        assert collected.token_ids == cold["greedy-24"]
        assert collected.last.num_cached_tokens == num_cached
    watched.group.close()


@pytest.mark.product(2)
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2)])
def test_a_preempted_request_finds_its_own_blocks(cold, scheduling, tp, dcp) -> None:
    """The same lives with and without cache: the streams stay, and fewer rows are computed."""
    requests = [r for n in (23, 24, 25, 33) for r in _both(TEXT[:n])]
    num_rows = {}
    for is_caching in (False, True):
        watched = Watched(
            tensor_parallel_size=tp,
            decode_context_parallel_size=dcp,
            num_speculative_tokens=3,
            scheduling=scheduling,
            enable_prefix_caching=is_caching,
            block_size=2,
            num_kv_blocks=48 // dcp,
        )
        # Salts keep them apart, so that what is found was their own.
        collected = watched.run(*(msgspec.structs.replace(r, cache_salt=r.request_id) for r in requests))
        assert {name: c.token_ids for name, c in collected.items()} == {
            r.request_id: cold[r.request_id] for r in requests
        }
        assert watched.group.stats().num_preemptions > 0
        assert all(c.last.num_cached_tokens == 0 for c in collected.values())
        num_rows[is_caching] = watched.chunk_rows()
        watched.group.close()
    assert num_rows[True] < num_rows[False]
