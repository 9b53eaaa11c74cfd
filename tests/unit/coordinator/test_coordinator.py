"""The coordinator's doors: submit, abort, report, statistics, log probabilities."""

import numpy as np
import pytest

from actors.messages import RowKind, StepOutput
from actors.requests import RequestFailed, RequestUpdate, SequenceKey
from kernels_integration.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    LatentrayError,
    UnavailableError,
)
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import VOCAB, anti_oracle, oracle, stream


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize(("draft", "share"), [(oracle, 1), (anti_oracle, 0)])
def test_acceptance_of_perfect_and_useless_drafts(k, draft, share) -> None:
    group = Group(group_config(num_speculative_tokens=k), draft=draft)
    for i in range(3):
        group.coordinator.submit(request(f"r{i}", [i] * 5, max_tokens=40))
    group.run()
    stats = group.coordinator.stats()
    verifies = sum((m.kind == RowKind.VERIFY).sum() for m in group.sent)
    proposed = [int(sum((m.k > i).sum() for m in group.sent)) for i in range(k)]
    assert stats.num_verifies == verifies
    assert list(stats.proposed) == proposed
    assert list(stats.accepted) == [p * share for p in proposed]
    assert stats.acceptance == (float(share),) * k
    if share == 0:
        assert stats.tokens_per_verify == 1
    for i in range(3):
        last = group.updates_of(f"r{i}")[-1]
        assert last.num_accepted_tokens == last.num_draft_tokens * share
    assert sum(group.updates_of(f"r{i}")[-1].num_draft_tokens for i in range(3)) == sum(proposed)


def test_verifies_come_first_by_k_then_chunks() -> None:
    wanted = {"r0": 1, "r1": 3, "r2": 2}
    group = Group(draft_policy=lambda state: wanted[state.request.request_id])
    for i in range(3):
        group.coordinator.submit(request(f"r{i}", [i] * 4, max_tokens=20))
    group.send()
    group.report()
    group.coordinator.submit(request("r3", [9] * 90, max_tokens=2))
    group.send()
    message = group.sent[-1]
    assert message.k.tolist() == [3, 2, 1, 0]
    assert message.kind.tolist() == [RowKind.VERIFY] * 3 + [RowKind.MIDDLE_CHUNK]
    assert message.fill.tolist() == [1, 1, 1, 0]
    assert len(message.ids) == 64 - (3 + 2 + 1 + 3)


def test_drafts_leave_a_row_for_every_later_anchor() -> None:
    group = Group(group_config(max_num_batched_tokens=8, num_speculative_tokens=8))
    for i in range(4):
        group.coordinator.submit(request(f"r{i}", [i, i], max_tokens=20))
    group.send()
    group.report()
    group.send()
    assert sorted(group.sent[-1].k.tolist()) == [0, 0, 0, 4]


def test_abort_before_the_first_step() -> None:
    group = Group()
    group.coordinator.submit(request())
    group.coordinator.abort([SequenceKey("r"), SequenceKey("r"), SequenceKey("unknown")])
    assert group.coordinator.take_updates() == [
        RequestFailed(request_id="r", code="aborted", message="the request was aborted")
    ]
    group.coordinator.abort([SequenceKey("r")])
    assert group.coordinator.take_updates() == []
    assert not group.coordinator.has_work
    assert group.coordinator.schedule() is None


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_abort_with_a_step_in_flight_frees_blocks_for_the_next_message(steps_before) -> None:
    """The pool holds one request: the next one needs the blocks that the step in flight still writes to."""
    group = Group(group_config(num_kv_blocks=8, max_num_batched_tokens=8))
    group.coordinator.submit(request("a", range(20), max_tokens=13))
    group.coordinator.submit(request("b", range(20, 40), max_tokens=13))
    for _ in range(steps_before):
        group.send()
        group.report()
    group.send()
    group.coordinator.abort([SequenceKey("a")])
    assert group.coordinator.stats().num_used_blocks == 0
    assert group.coordinator.has_work
    group.report()
    before = len(group.tokens("a"))
    group.run()
    assert len(group.tokens("a")) == before
    assert group.tokens("b") == stream(range(20, 40), 5, 13)
    assert group.coordinator.stats().num_aborted == 1


def test_an_aborted_id_is_free_at_once_and_old_results_do_not_reach_its_successor() -> None:
    group = Group()
    group.coordinator.submit(request("r", [1, 2, 3], max_tokens=9))
    group.send()
    group.coordinator.abort([SequenceKey("r")])
    group.coordinator.take_updates()
    group.coordinator.submit(request("r", [4, 5], max_tokens=9))
    group.report()
    assert group.updates == []
    group.run()
    assert group.tokens() == stream([4, 5], 5, 9)


def test_a_live_id_is_refused_and_a_finished_one_may_come_again() -> None:
    group = Group()
    group.coordinator.submit(request(max_tokens=4))
    with pytest.raises(DuplicateRequestError, match="'r'"):
        group.coordinator.submit(request(max_tokens=4))
    group.run()
    group.coordinator.submit(request(max_tokens=4))
    group.run()
    assert group.tokens() == stream([1, 2, 3], 5, 4) * 2


@pytest.mark.parametrize(
    ("prompt", "params", "field", "words"),
    [
        ((), {}, "prompt", "0 tokens; it must have at least one"),
        ([1] * 128, {}, "prompt", "128 tokens; .* room for 127 and one new token"),
        ([1] * 20, {"max_tokens": 22}, "max_tokens", "need 11 KV blocks; the group has 10, for 41 tokens"),
        ([1] * 20, {"max_tokens": None}, "max_tokens", "need 32 KV blocks"),
        ([1], {"stop": ("x",)}, "stop", "need a tokenizer"),
    ],
)
def test_requests_that_could_never_run_are_refused(prompt, params, field, words) -> None:
    group = Group(group_config(num_kv_blocks=10))
    with pytest.raises(InvalidRequestError, match=words) as error:
        group.coordinator.submit(request(prompt=prompt, **params))
    assert error.value.field == field
    assert not group.coordinator.has_work


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [99, 100]},
        {"allowed_token_ids": (100,)},
        {"logit_bias": {100: 1.0}},
        {"stop_token_ids": (100,), "min_tokens": 1},
        {"eos": (100,), "min_tokens": 1},
    ],
)
def test_token_ids_that_the_shards_could_not_look_up_are_refused(fields) -> None:
    group = Group(group_config(vocab_size=100))
    with pytest.raises(InvalidRequestError, match="token id 100; token ids are below 100"):
        group.coordinator.submit(request(**fields))
    assert not group.coordinator.has_work


def test_a_request_whose_tokens_cannot_be_read_fails_alone(monkeypatch) -> None:
    """Such as of a tokenizer that gives up on them."""
    group = Group()
    for name in ("bad", "good"):
        group.coordinator.submit(request(name, max_tokens=20))
    group.send()
    group.report()
    state = group.coordinator._live[SequenceKey("bad")]

    cut = type(state.stop).cut

    def give_up(conditions, num_tokens, emitted) -> int:
        if conditions is state.stop:
            raise OverflowError("a tokenizer's fault")
        return cut(conditions, num_tokens, emitted)

    monkeypatch.setattr(type(state.stop), "cut", give_up)
    group.send()
    group.report()
    [failed] = [u for u in group.updates if isinstance(u, RequestFailed)]
    assert (failed.request_id, failed.code) == ("bad", "internal")
    assert "OverflowError" in failed.message
    assert SequenceKey("good") in group.coordinator._live
    group.check_blocks()


def test_the_largest_request_that_fits_completes() -> None:
    group = Group(group_config(num_kv_blocks=10))
    group.coordinator.submit(request(prompt=[1] * 20, max_tokens=21))
    group.run()
    assert group.tokens() == stream([1] * 20, 5, 21)


def test_max_model_len_ends_a_request_without_max_tokens() -> None:
    group = Group(group_config(max_model_len=30))
    group.coordinator.submit(request(prompt=[1] * 20, max_tokens=None))
    group.run()
    assert group.tokens() == stream([1] * 20, 5, 10)
    assert group.updates[-1].finish_reason == "length"


def test_restart_goes_on_with_the_stream_and_drops_late_reports() -> None:
    group = Group()
    group.coordinator.submit(request(max_tokens=20))
    for _ in range(3):
        group.send()
        group.report()
    group.send()
    late = group.execute()
    group.coordinator.restart(1)
    group.coordinator.process(late)
    assert group.coordinator.take_updates() == []
    group.shard.lose_state()
    group.run()
    assert group.tokens() == stream([1, 2, 3], 5, 20)
    assert group.sent[-1].epoch == 1
    assert group.coordinator.stats().num_preemptions == 0


def test_fail_all_ends_every_request_with_the_code() -> None:
    group = Group(group_config(max_num_seqs=1))
    for i in range(2):
        group.coordinator.submit(request(f"r{i}", max_tokens=9))
    group.send()
    group.coordinator.fail_all(UnavailableError("shard 1 is lost"))
    assert group.coordinator.take_updates() == [
        RequestFailed(request_id=f"r{i}", code="unavailable", message="shard 1 is lost") for i in range(2)
    ]
    group.check_blocks()


def test_reports_that_do_not_answer_the_step_in_flight_are_errors() -> None:
    group = Group()
    group.coordinator.submit(request(max_tokens=9))
    group.send()
    right = group.execute()

    def report(**changes) -> StepOutput:
        values = {f: getattr(right, f) for f in right.__struct_fields__}
        return StepOutput(**values | changes)

    for changes, words in [
        ({"step": 2}, "epoch 0 step 2; expected epoch 0 step 1"),
        ({"epoch": 1}, "epoch 1 step 1; expected"),
        ({"tokens": np.zeros(2, np.int32)}, r"\(0, 2, 1\)"),
    ]:
        with pytest.raises(LatentrayError, match=words):
            group.coordinator.process(report(**changes))
    group.coordinator.process(right)
    with pytest.raises(LatentrayError, match="expected nothing"):
        group.coordinator.process(right)
    assert [u.token_ids for u in group.coordinator.take_updates()] == [tuple(stream([1, 2, 3], 5, 1))]

    group.send()
    with pytest.raises(LatentrayError, match="request 'r': the shards hold 90 tokens; expected "):
        group.coordinator.process(
            StepOutput(
                epoch=0,
                step=2,
                drafts=np.zeros(3, np.int32),
                tokens=np.zeros(4, np.int32),
                length=np.array([90], np.int32),
            )
        )


def test_each_emitted_token_carries_its_own_log_probabilities() -> None:
    group = Group(draft=oracle)
    wanted = {"none": None, "zero": 0, "two": 2, "five": 5}
    for i, (request_id, n) in enumerate(wanted.items()):
        group.coordinator.submit(request(request_id, [i] * 5, max_tokens=9, logprobs=n))
    group.run()
    for request_id, n in wanted.items():
        updates = [u for u in group.updates_of(request_id) if isinstance(u, RequestUpdate)]
        found = [entry for u in updates for entry in u.logprobs]
        if n is None:
            assert found == []
            continue
        assert [len(u.logprobs) for u in updates] == [len(u.token_ids) for u in updates]
        for token, entry in zip(group.tokens(request_id), found, strict=True):
            assert (entry.token_id, entry.logprob) == (token, -token)
            assert entry.top == tuple(((token + j) % VOCAB, -(token + j)) for j in range(n))


def test_statistics() -> None:
    now = [0.0]
    group = Group(group_config(max_num_seqs=1), clock=lambda: now[0])
    for i in range(2):
        group.coordinator.submit(request(f"r{i}", [1] * 10, max_tokens=5))
    group.send()
    stats = group.coordinator.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.num_used_blocks, stats.num_kv_blocks) == (3, 64)
    now[0] = 2.0
    group.report()
    stats = group.coordinator.stats()
    assert (stats.num_steps, stats.num_rows) == (1, 10)
    assert (stats.schedule_s, stats.step_s, stats.process_s) == (0.0, 2.0, 0.0)
    while group.send():
        now[0] += 1.0
        group.report()
        stats = group.coordinator.stats()
    num_verifies, phases = len(group.sent) - 2, stats.phases
    # The second request waits until the first has ended; both are one step in prefill.
    assert (phases.num_finished, phases.prefill_s, phases.decode_s) == (2, 2.0 + 1.0, num_verifies)
    assert 2.0 < phases.queue_s < 2.0 + num_verifies
    told = [u.phases for u in group.updates if isinstance(u, RequestUpdate) and u.phases is not None]
    assert [own.num_finished for own in told] == [1, 1], "in the last update of each alone"
    for name in ("queue_s", "prefill_s", "decode_s"):
        assert sum(getattr(own, name) for own in told) == getattr(phases, name)
    assert (stats.num_cache_queries, stats.num_cache_hits) == (20, 8)
    assert (stats.num_finished, stats.num_prompt_tokens, stats.num_generated_tokens) == (2, 20, 10)
    assert stats.num_rows == sum(int((m.k + (m.kind == 0)).sum()) + len(m.ids) for m in group.sent)
