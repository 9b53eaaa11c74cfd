"""Steps in flight: what is sent before the last one has reported."""

import pytest

from actors.messages import RowKind
from actors.requests import SequenceKey
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import anti_oracle, oracle, sometimes_right, stream


def send_all(group: Group) -> int:
    return sum(iter(group.send, False))


@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
def test_steps_in_flight(scheduling) -> None:
    group = Group(group_config(scheduling=scheduling))
    group.coordinator.submit(request(max_tokens=20))
    assert send_all(group) == (2 if scheduling == "deferred" else 1)
    first, *following = group.sent
    assert first.kind.tolist() == [RowKind.FINAL_CHUNK]
    for message in following:
        assert message.kind.tolist() == [RowKind.VERIFY]
        assert message.start.tolist() == [-1]
        assert len(message.accepted) == 0


def test_a_request_that_has_nothing_in_flight_says_what_it_knows() -> None:
    """Its last token step has reported, so start and accepted tokens are sent, and checked by the shards."""
    group = Group(max_steps_in_flight=2)
    group.coordinator.submit(request(max_tokens=20))
    group.send()
    group.report()
    group.send()
    group.send()
    _, known, unknown = group.sent
    assert (known.start.tolist(), known.accepted.tolist()) == ([3], stream([1, 2, 3], 5, 1))
    assert (unknown.start.tolist(), unknown.accepted.tolist()) == ([-1], [])


@pytest.mark.product(60)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("draft", [oracle, anti_oracle, sometimes_right])
@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10, 11])
def test_streams_do_not_depend_on_steps_in_flight(in_flight, draft, k, max_tokens) -> None:
    group = Group(group_config(num_speculative_tokens=k), draft=draft, max_steps_in_flight=in_flight)
    for i in range(3):
        group.coordinator.submit(request(f"r{i}", [i] * 5, max_tokens=max_tokens))
    group.run()
    for i in range(3):
        assert group.tokens(f"r{i}") == stream([i] * 5, 5, max_tokens)
        assert group.updates_of(f"r{i}")[-1].num_completion_tokens == max_tokens


def test_rows_beyond_the_limit_are_masked_and_reserve_nothing() -> None:
    """Eight right drafts at once: the next step's rows lie beyond the limit, where the pool has no block."""
    group = Group(
        group_config(num_speculative_tokens=8, block_size=1, num_kv_blocks=22),
        draft=oracle,
        max_steps_in_flight=3,
    )
    group.coordinator.submit(request(prompt=[1, 2, 3], max_tokens=20))
    group.run()
    assert group.tokens() == stream([1, 2, 3], 5, 20)
    assert group.shard.num_masked > 0
    assert max(int(b) for m in group.sent for b in m.new_blocks) == 21


def test_a_request_that_may_be_complete_is_not_scheduled() -> None:
    group = Group(draft=oracle, max_steps_in_flight=3)
    group.coordinator.submit(request(max_tokens=2))
    assert send_all(group) == 2  # the chunk yields the first token, one verify the second at least
    group.run()
    assert group.tokens() == stream([1, 2, 3], 5, 2)


@pytest.mark.parametrize("reported", [0, 1, 2])
def test_an_abort_with_two_steps_in_flight(reported) -> None:
    """The pool holds one request: the next message uses the blocks that both steps still write to."""
    group = Group(group_config(num_kv_blocks=8, max_num_batched_tokens=40), max_steps_in_flight=3)
    group.coordinator.submit(request("a", range(20), max_tokens=13))
    group.coordinator.submit(request("b", range(20, 40), max_tokens=13))
    assert group.send()
    assert group.send()
    for _ in range(reported):
        group.report()
    before = len(group.tokens("a"))
    group.coordinator.abort([SequenceKey("a")])
    assert group.send()
    assert group.sent[-1].admit
    group.run()
    assert len(group.tokens("a")) == before
    assert group.tokens("b") == stream(range(20, 40), 5, 13)


def test_a_stop_with_a_step_in_flight_ends_the_stream_there() -> None:
    completion = stream([1, 2, 3], 5, 40)
    for at in range(1, 12):
        group = Group(draft=oracle, max_steps_in_flight=2)
        group.coordinator.submit(request(max_tokens=40, stop_token_ids=(completion[at],)))
        group.coordinator.submit(request("other", [9], max_tokens=30))
        group.run()
        assert group.tokens() == completion[: completion.index(completion[at]) + 1]
        assert group.tokens("other") == stream([9], 5, 30)


def test_nobody_is_preempted_on_a_guess() -> None:
    """Of nine tokens that a step may accept, one is: a request whose room is short waits for the report."""
    config = group_config(num_speculative_tokens=8, block_size=1, num_kv_blocks=64)
    preemptions = {}
    for in_flight in (1, 2, 3):
        group = Group(config, draft=anti_oracle, max_steps_in_flight=in_flight)
        for i in range(2):
            group.coordinator.submit(request(f"r{i}", [i, 7], max_tokens=30))
        group.run()
        for i in range(2):
            assert group.tokens(f"r{i}") == stream([i, 7], 5, 30)
        preemptions[in_flight] = group.coordinator.stats().num_preemptions
    assert preemptions == {1: 0, 2: 0, 3: 0}


def test_only_middle_chunks_in_flight() -> None:
    group = Group(group_config(max_num_batched_tokens=4), max_steps_in_flight=3)
    group.coordinator.submit(request(prompt=range(40), max_tokens=5))
    assert send_all(group) == 3
    assert [m.kind.tolist() for m in group.sent] == [[RowKind.MIDDLE_CHUNK]] * 3
    assert [m.start.tolist() for m in group.sent] == [[0], [4], [8]]
    group.run()
    assert group.tokens() == stream(range(40), 5, 5)
