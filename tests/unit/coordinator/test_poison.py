"""A request that kills the shards, at the coordinator: it is found and rejected, the others finish."""

import pytest

from actors.messages import StepInput
from actors.requests import RequestFailed
from tests.support.fake_group import Group, group_config, request

POISON = (1, 1)
"""The beginning of the poisonous prompt, and of no other."""


def slots_of_poison(message: StepInput) -> set[int]:
    """Slots that this step admits the poison to."""
    num_verifies = len(message.slot) - (len(message.ids_indptr) - 1)
    chunks = zip(message.slot[num_verifies:], message.start[num_verifies:], message.ids_indptr, strict=False)
    return {
        int(slot)
        for slot, start, begin in chunks
        if start == 0 and tuple(message.ids[begin : begin + 2].tolist()) == POISON
    }


def run_with_poison(group: Group) -> int:
    """Until nothing is live: each step that touches the poison ends the shards. How many losses counted."""
    epoch = num_counted = num_seen = 0
    slots: set[int] = set()
    while group.coordinator.has_work:
        while group.send():
            pass
        new, num_seen = group.sent[num_seen:], len(group.sent)
        for message in new:
            slots = (slots - {admission.slot for admission in message.admit}) | slots_of_poison(message)
        if any(slot in slots for message in new for slot in message.slot.tolist()):
            epoch += 1
            assert epoch < 12, "it is never found"
            num_counted += not group.coordinator.blame()
            group.restart(epoch)
            slots = set()
        elif group.num_in_flight:
            group.report()
        group.updates += group.coordinator.take_updates()
    return num_counted


@pytest.mark.parametrize("num_others", [0, 3, 7])
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
def test_a_poisonous_request_is_rejected_and_the_others_finish(num_others: int, scheduling: str) -> None:
    asked = [request(f"r{i}", (2 + i, 3, 4), max_tokens=12) for i in range(num_others)]
    undisturbed = Group(group_config(max_num_seqs=8))
    for one in asked:
        undisturbed.coordinator.submit(one)
    undisturbed.run()
    group = Group(group_config(max_num_seqs=8, scheduling=scheduling))
    for one in [*asked, request("poison", POISON, max_tokens=12)]:
        group.coordinator.submit(one)
    assert run_with_poison(group) == 2, "losses that bring the cause nearer do not count"
    [failed] = group.updates_of("poison")
    assert isinstance(failed, RequestFailed)
    assert failed.code == "poison_request"
    assert "'poison' is rejected" in failed.message
    for one in asked:
        assert group.tokens(one.request_id) == undisturbed.tokens(one.request_id)
    group.check_blocks()
    assert group.coordinator.stats().waiting == 0


def test_what_comes_during_a_trial_waits_and_may_be_aborted() -> None:
    group = Group()
    group.coordinator.submit(request("a", max_tokens=12))
    group.coordinator.submit(request("b", max_tokens=12))
    for epoch in (1, 2):
        assert group.send()
        group.coordinator.blame()
        group.restart(epoch)
    group.coordinator.submit(request("late", max_tokens=12))
    assert group.send()
    assert len(group.sent[-1].admit) == 1
    stats = group.coordinator.stats()
    assert (stats.running, stats.waiting) == (1, 2)
    group.coordinator.abort([request("late").key, request("a").key])
    assert group.coordinator.stats().waiting == 1
    group.run()
    assert len(group.tokens("b")) == 12
    group.check_blocks()
