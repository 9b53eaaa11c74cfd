"""Who gets rows, slots and blocks: long prompts beside short ones, priorities, admission."""

from actors.messages import RowKind
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import anti_oracle, stream


class TimedGroup(Group):
    """Remembers in which step a request's first token came."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.first_steps: dict[str, int] = {}

    def report(self) -> None:
        seen = len(self.updates)
        step = self._unanswered[0][0].step
        super().report()
        for update in self.updates[seen:]:
            self.first_steps.setdefault(update.request_id, step)


def first_token_step(group: TimedGroup, request_id: str) -> int:
    """Number of the step whose report brought the request's first token."""
    return group.first_steps[request_id]


def test_a_long_prompt_does_not_starve_short_ones() -> None:
    steps = {}
    for threshold in (0, 8):
        group = TimedGroup(
            group_config(
                max_model_len=400,
                num_kv_blocks=200,
                max_num_batched_tokens=16,
                long_prefill_token_threshold=threshold,
            )
        )
        group.coordinator.submit(request("long", range(300), max_tokens=3))
        for i in range(3):
            group.coordinator.submit(request(f"short{i}", [i] * 6, max_tokens=3))
        group.run()
        steps[threshold] = [group.first_steps[f"short{i}"] for i in range(3)]
        assert group.tokens("long") == stream(range(300), 5, 3)
    assert min(steps[0]) > 300 // 16
    assert max(steps[8]) <= 4


def test_a_long_prompt_alone_gets_all_rows() -> None:
    group = Group(group_config(max_num_batched_tokens=16, long_prefill_token_threshold=8))
    group.coordinator.submit(request("long", range(64), max_tokens=3))
    group.run()
    assert [len(m.ids) for m in group.sent[:4]] == [16] * 4


def test_a_long_prompt_that_came_first_leaves_rows_to_who_decodes() -> None:
    group = Group(group_config(max_num_batched_tokens=8, num_speculative_tokens=0))
    group.coordinator.submit(request("long", range(60), max_tokens=3))
    group.coordinator._scheduler._max_rows_of_long_prompt = 4  # so that "short" gets in
    group.coordinator.submit(request("short", [1], max_tokens=30))
    group.send()
    group.report()
    group.coordinator._scheduler._max_rows_of_long_prompt = 8
    for _ in range(5):
        group.send()
        assert group.sent[-1].kind.tolist() == [RowKind.VERIFY, RowKind.MIDDLE_CHUNK]
        group.report()


def test_priority_orders_the_line() -> None:
    for policy, order in [("fcfs", ["a", "b", "c", "d"]), ("priority", ["c", "b", "d", "a"])]:
        group = TimedGroup(group_config(max_num_seqs=1, scheduling_policy=policy))
        for name, priority in [("a", 2), ("b", 0), ("c", -1), ("d", 0)]:
            group.coordinator.submit(request(name, [1, 2], max_tokens=3, priority=priority))
        group.run()
        assert sorted(group.first_steps, key=group.first_steps.__getitem__) == order


def test_an_urgent_request_pushes_out_a_less_urgent_one_and_no_equal() -> None:
    group = TimedGroup(group_config(max_num_seqs=2, scheduling_policy="priority"))
    group.coordinator.submit(request("low", [1, 2], max_tokens=30, priority=5))
    group.coordinator.submit(request("high", [3, 4], max_tokens=30, priority=1))
    for _ in range(3):
        group.send()
        group.report()
    group.coordinator.submit(request("equal", [5], max_tokens=30, priority=5))
    group.send()
    group.report()
    assert group.coordinator.stats().num_preemptions == 0
    group.coordinator.submit(request("urgent", [6], max_tokens=3, priority=1))
    group.send()
    assert group.coordinator.stats().num_preemptions == 1
    assert len(group.sent[-1].admit) == 1
    group.run()
    assert group.first_steps["urgent"] < group.first_steps["equal"]
    for name, prompt, n in [
        ("low", [1, 2], 30),
        ("high", [3, 4], 30),
        ("equal", [5], 30),
        ("urgent", [6], 3),
    ]:
        assert group.tokens(name) == stream(prompt, 5, n)
    assert group.coordinator.stats().num_preemptions == 1


def test_an_urgent_request_pushes_out_nobody_if_that_does_not_let_it_in() -> None:
    """It needs 25 of 32 blocks, of which an equally urgent one holds 20."""
    group = Group(
        group_config(scheduling_policy="priority", block_size=1, num_kv_blocks=32, num_speculative_tokens=0)
    )
    group.coordinator.submit(request("equal", range(20), max_tokens=6, priority=1))
    group.coordinator.submit(request("low", [1], max_tokens=6, priority=2))
    group.send()
    group.report()
    group.coordinator.submit(request("urgent", range(50, 75), max_tokens=2, priority=1))
    group.send()
    group.report()
    assert group.coordinator.stats().num_preemptions == 0
    group.run()
    assert group.tokens("urgent") == stream(range(50, 75), 5, 2)


def test_whoever_comes_in_stays_for_a_verify() -> None:
    """Without room for everybody's next step a prompt would be computed only to be thrown away."""
    group = Group(
        group_config(block_size=1, num_kv_blocks=40, num_speculative_tokens=3, enable_prefix_caching=False),
        draft=anti_oracle,
    )
    for i in range(4):
        group.coordinator.submit(request(f"r{i}", [i] * 8, max_tokens=25))
    group.run()
    preemptions = group.coordinator.stats().num_preemptions
    rows = sum(len(m.ids) for m in group.sent)
    admissions = sum(len(m.admit) for m in group.sent)
    assert admissions == 4 + preemptions
    generated = {a.admission for m in group.sent for a in m.admit}
    verified = {int(n) for m in group.sent for n in m.admission[m.kind == RowKind.VERIFY]}
    assert generated == verified
    assert rows < 4 * 33 * 2
