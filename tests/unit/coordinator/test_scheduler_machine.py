"""Random lives of a group: streams are the target's, blocks are accounted for, work goes on."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from actors.requests import Request, RequestFailed, SequenceKey
from kernels_integration.errors import DuplicateRequestError, InvalidRequestError
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import stream

BEGINNING = tuple(n % 5 for n in range(33))
"""Prompts share parts of it, so that they find each other's blocks."""


def expected_end(r: Request, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Completion, finish_reason, matched_stop: one token at a time, from the definition."""
    prompt = list(r.prompt_token_ids)
    limit = max_model_len - len(prompt)
    if r.params.max_tokens is not None:
        limit = min(limit, r.params.max_tokens)
    completion = []
    for token in stream(prompt, r.seed, limit):
        completion.append(token)
        if token in r.eos_token_ids and not r.params.ignore_eos:
            return completion, "stop", None
        if token in r.params.stop_token_ids:
            return completion, "stop", token
    return completion, "length", None


class GroupMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data) -> None:
        block_size = data.draw(st.sampled_from([1, 1, 2, 2, 3, 4, 4, 8, 16, 64]))
        dcp = data.draw(st.sampled_from([1, 2, 4]))
        interleave = data.draw(st.sampled_from([s for s in range(1, block_size + 1) if block_size % s == 0]))
        max_model_len = data.draw(st.sampled_from([2, 3, 20, 50, 50, 80, 80, 80]))
        entries = -(-max_model_len // (block_size * dcp))
        self.random = random.Random(data.draw(st.integers(0, 2**32)))
        policy = data.draw(st.sampled_from(["ceiling", "random", "mostly zero"]))
        config = group_config(
            num_speculative_tokens=data.draw(st.integers(0, 8)),
            max_model_len=max_model_len,
            max_num_seqs=data.draw(st.integers(1, 6)),
            max_num_batched_tokens=data.draw(st.one_of(st.integers(1, 6), st.integers(7, 100))),
            block_size=block_size,
            num_kv_blocks=entries + data.draw(st.sampled_from([-1, 0, 0, 1, 2, entries, 3 * entries])) or 1,
            decode_context_parallel_size=dcp,
            tensor_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
            scheduling_policy=data.draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
            long_prefill_token_threshold=data.draw(st.sampled_from([0, 0, 1, 5])),
            enable_prefix_caching=data.draw(st.sampled_from([True, True, True, False])),
            prefix_caching_hash_algo=data.draw(st.sampled_from(["xxhash", "sha256"])),
        )
        self.max_in_flight = data.draw(st.integers(1, 3))
        self.group = Group(
            config,
            max_steps_in_flight=self.max_in_flight,
            draft_policy=None if policy == "ceiling" else getattr(self, f"_{policy.replace(' ', '_')}"),
        )
        self.submitted: list[Request] = []
        self.live: dict[str, Request] = {}
        self.calm = data.draw(st.booleans())
        self.received: dict[str, list[int]] = {}
        self.epoch = 0
        self.seen = 0

    def _random(self, _request) -> int:
        return self.random.randint(0, 8)

    def _mostly_zero(self, _request) -> int:
        return self.random.choice([0] * 40 + [1, 8])

    @rule(
        beginning=st.sampled_from([(), BEGINNING[:15], BEGINNING[:16], BEGINNING[:17], BEGINNING]),
        end=st.lists(st.integers(0, 3), max_size=40),
        max_tokens=st.sampled_from([None, None, 1, 2, 10, 40]),
        seed=st.integers(0, 2**64 - 1),
        eos=st.sampled_from([(), (), (7,), (7, 8)]),
        stop=st.sampled_from([(), (), (9,), (7, 9)]),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, "a", "b"]),
        priority=st.integers(-1, 1),
    )
    def submit(self, beginning, end, max_tokens, seed, eos, stop, ignore_eos, salt, priority) -> None:
        config = self.group.config
        prompt = [*beginning, *end][:40] or [0]
        r = request(
            f"r{len(self.submitted)}",
            prompt,
            seed=seed,
            eos=eos,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            cache_salt=salt,
            priority=priority,
        )
        limit = min(config.max_model_len, len(prompt) + (max_tokens or 10**9))
        fits = (
            len(prompt) < config.max_model_len
            and (limit - 1) <= config.num_kv_blocks * config.block_size * config.decode_context_parallel_size
        )
        if not fits:
            with pytest.raises(InvalidRequestError):
                self.group.coordinator.submit(r)
            return
        self.group.coordinator.submit(r)
        self.submitted.append(r)
        self.live[r.request_id] = r
        self.received[r.request_id] = []

    @precondition(lambda self: self.group.num_in_flight < self.max_in_flight)
    @rule()
    def send(self) -> None:
        is_idle = not self.group.num_in_flight
        sent = self.group.send()
        if is_idle:
            assert sent == bool(self.live)

    @precondition(lambda self: self.group.num_in_flight)
    @rule()
    def report(self) -> None:
        if self.group.num_in_flight == self.max_in_flight:
            assert self.group.coordinator.schedule() is None
        self.group.report()

    @rule(steps=st.integers(1, 8))
    def run_steps(self, steps) -> None:
        """With as many steps in flight as may be."""
        for _ in range(steps):
            while self.group.send():
                pass
            if self.group.num_in_flight:
                self.group.report()
                self._read_updates()

    @precondition(lambda self: self.live and not self.calm)
    @rule(data=st.data())
    def abort(self, data) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=3))
        used = self.group.coordinator.stats().num_used_blocks
        self.group.coordinator.abort([SequenceKey(i) for i in (*ids, "never seen")])
        assert self.group.coordinator.stats().num_used_blocks <= used
        for request_id in set(ids):
            del self.live[request_id]
        updates = self.group.coordinator.take_updates()
        assert [(u.request_id, u.code) for u in updates] == [(i, "aborted") for i in dict.fromkeys(ids)]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def submit_a_live_id(self, data) -> None:
        with pytest.raises(DuplicateRequestError):
            self.group.coordinator.submit(request(data.draw(st.sampled_from(sorted(self.live)))))

    @precondition(lambda self: self.live and not self.calm)
    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.group.restart(self.epoch)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "group"):
            self._read_updates()
            self.group.check_blocks()
            stats = self.group.coordinator.stats()
            assert stats.running + stats.waiting == len(self.live)

    def _read_updates(self) -> None:
        for update in self.group.updates[self.seen :]:
            assert not isinstance(update, RequestFailed)
            r = self.live[update.request_id]  # nothing arrives after an end
            tokens = self.received[r.request_id]
            tokens += update.token_ids
            assert update.token_ids
            assert update.num_completion_tokens == len(tokens)
            assert update.num_prompt_tokens == len(r.prompt_token_ids)
            assert update.num_accepted_tokens <= update.num_draft_tokens
            expected, reason, matched = expected_end(r, self.group.config.max_model_len)
            if update.finish_reason is None:
                assert tokens == expected[: len(tokens)]
                assert len(tokens) < len(expected)
            else:
                assert (tokens, update.finish_reason, update.matched_stop) == (expected, reason, matched)
                del self.live[r.request_id]
        self.seen = len(self.group.updates)

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        # In every step somebody commits a token or computes a row that only a preemption can undo.
        most = sum(len(r.prompt_token_ids) + 40 + self.group.config.max_model_len for r in self.live.values())
        self.group.run(max_steps=2 * most + 4)
        self._read_updates()
        assert not self.live
        stats = self.group.coordinator.stats()
        assert stats.num_used_blocks == 0
        if self.epoch == 0 and stats.num_aborted == 0:
            if self.max_in_flight == 1:  # else steps in flight of who has ended or was preempted do not count
                assert sum(stats.proposed) == self.group.shard.num_proposed
                assert sum(stats.accepted) == self.group.shard.num_accepted
            assert stats.num_generated_tokens == sum(map(len, self.received.values()))


def _run(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        GroupMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_random_lives() -> None:
    _run(max_examples=100, steps=60)


@pytest.mark.product(0)
@pytest.mark.slow
def test_many_random_lives() -> None:
    _run(max_examples=600, steps=60)
