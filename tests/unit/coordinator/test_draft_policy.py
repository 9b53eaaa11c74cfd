"""The choice of k against simulated machines and texts, whose best k is known."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from actors.coordinator.draft_policy import (
    PROBE_HORIZON_PER_K,
    DraftTable,
    DynamicDrafts,
    StepResult,
    draft_policy_of,
)
from tests.support.fake_group import Group, group_config, request

Cost = Callable[[int, int, int], float]


def cpu(size: int, k: int, num_drafts: int) -> float:
    """Every row costs."""
    return (12 + 5 * (k > 0) + 2.5 * max(k - 1, 0) + 0.9 * (size + num_drafts)) / 1e3


def gpu(size: int, k: int, num_drafts: int) -> float:
    """Rows are free until the machine is full."""
    return (30 + 1 * (k > 0) + 1 * max(k - 1, 0) + 0.4 * max(0, size + num_drafts - 64)) / 1e3


class _Running:
    """As much of a request as a policy looks at."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Simulation:
    """Steps of a machine whose times scatter by 10 %, one in fifty several times as long."""

    def __init__(self, cost: Cost, *, max_k: int = 3, seed: int = 0) -> None:
        self.cost = cost
        self.policy = DynamicDrafts(num_speculative_tokens=max_k, max_num_seqs=64)
        self.random = random.Random(seed)
        self.history: list[list[int]] = []
        """Of each step: k by slot."""

    def run(self, acceptance: list[list[float]], num_steps: int) -> float:
        """Requests with these conditional rates by position; tokens a second."""
        running = [_Running(slot) for slot in range(len(acceptance))]
        num_tokens, seconds = 0, 0.0
        for _ in range(num_steps):
            self.policy.begin_step(running)
            k_of_slot = [self.policy.num_drafts(r) for r in running]
            self.history.append(k_of_slot)
            order = sorted(range(len(running)), key=lambda slot: -k_of_slot[slot])
            accepted = [self._accepted(acceptance[slot], k_of_slot[slot]) for slot in order]
            k = np.array([k_of_slot[slot] for slot in order])
            step_s = self.cost(len(running), int(k[0]), int(k.sum()))
            num_tokens += len(running) + sum(accepted)
            seconds += step_s
            noise = self.random.lognormvariate(0, 0.1)
            outlier = self.random.uniform(2, 5) if self.random.random() < 0.02 else 1
            self.policy.observe(
                StepResult(
                    slots=np.array(order),
                    k=k,
                    accepted=np.array(accepted),
                    has_chunks=False,
                    seconds=step_s * noise * outlier,
                )
            )
        return num_tokens / seconds

    def greatest(self, last: int) -> list[int]:
        """The greatest k of each of the last steps."""
        return [max(k_of_slot) for k_of_slot in self.history[-last:]]

    def _accepted(self, rates: list[float], k: int) -> int:
        return next((i for i in range(k) if self.random.random() >= rates[i]), k)


def rate(cost: Cost, size: int, rates: list[float], k: int) -> float:
    return float(size * (1 + np.cumprod(rates)[:k].sum()) / cost(size, k, size * k))


@pytest.mark.product(9)
@pytest.mark.parametrize("cost", [cpu, gpu])
@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("rates", [[0.3, 0.25, 0.2], [0.75, 0.75, 0.7], [0.97, 0.97, 0.97]])
def test_hardly_slower_than_the_better_of_none_and_all(cost, size, rates) -> None:
    simulation = Simulation(cost)
    simulation.run([rates] * size, 200)  # it learns
    reached = simulation.run([rates] * size, 800)
    assert reached > 0.96 * max(rate(cost, size, rates, 0), rate(cost, size, rates, 3))


@pytest.mark.parametrize(
    ("cost", "size", "rates", "best"),
    [(cpu, 16, [0.3, 0.2, 0.1], 0), (cpu, 1, [0.97] * 3, 3), (gpu, 32, [0.6, 0.5, 0.4], 1)],
)
def test_finds_the_best_k_and_stays(cost, size, rates, best) -> None:
    assert best == max(range(4), key=lambda k: rate(cost, size, rates, k))
    simulation = Simulation(cost)
    simulation.run([rates] * size, 600)
    chosen = simulation.greatest(400)
    assert chosen.count(best) > 0.9 * len(chosen)


def test_comes_back_when_the_load_falls() -> None:
    rates = [0.6, 0.6, 0.6]
    simulation = Simulation(gpu)
    simulation.run([rates] * 4, 200)
    assert simulation.policy.k == 3
    simulation.run([rates] * 64, 300)
    assert simulation.policy.k == 0
    simulation.run([rates] * 4, 30)  # what it had learned of this batch size is still known
    assert simulation.policy.k == 3


def test_comes_back_when_the_text_changes() -> None:
    """At k = 0 nothing is measured but in probes."""
    simulation = Simulation(cpu)
    simulation.run([[0.2] * 3] * 8, 400)
    assert simulation.policy.k == 0
    simulation.run([[0.97] * 3] * 8, 6000)
    assert simulation.policy.k == 3


def test_probes_are_rare_where_they_cost_much() -> None:
    simulation = Simulation(cpu)
    simulation.run([[0.2, 0.2, 0.2]] * 16, 300)
    simulation.run([[0.2, 0.2, 0.2]] * 16, 3 * PROBE_HORIZON_PER_K // 2)
    chosen = simulation.greatest(3 * PROBE_HORIZON_PER_K // 2)
    assert 0 < sum(k > 0 for k in chosen) < 0.04 * len(chosen)


def test_noise_does_not_make_it_flutter() -> None:
    """k = 0 and k = 1 are worth the same."""

    def cost(size: int, k: int, num_drafts: int) -> float:
        return (1 + 0.5 * min(k, 1) + 2 * max(k - 1, 0)) / 100

    simulation = Simulation(cost)
    simulation.run([[0.5, 0.5, 0.5]] * 8, 300)
    simulation.run([[0.5, 0.5, 0.5]] * 8, 600)
    changes = sum(a != b for a, b in itertools.pairwise(simulation.greatest(600)))
    assert changes < 60


def test_each_request_gets_what_its_own_text_pays() -> None:
    good, bad = [0.97] * 3, [0.1] * 3
    simulation = Simulation(cpu)
    simulation.run([good] * 8 + [bad] * 8, 800)
    last = np.array(simulation.history[-200:])
    assert last[:, :8].mean() > 2
    assert last[:, 8:].mean() < 1


def test_the_same_measurements_give_the_same_choices() -> None:
    histories = []
    for _ in range(2):
        simulation = Simulation(cpu, max_k=8, seed=3)
        simulation.run([[0.7] * 8] * 5, 300)
        histories.append(simulation.history)
    assert histories[0] == histories[1]
    assert len(set(map(tuple, histories[0]))) > 1


def test_table() -> None:
    """A gap and the end are covered by the row before, as in vLLM."""
    policy = DraftTable(((1, 16, 3), (32, 128, 2), (256, 2048, 0)))
    expected = {0: 3, 1: 3, 16: 3, 17: 3, 31: 3, 32: 2, 128: 2, 129: 2, 255: 2, 256: 0, 4000: 0}
    for size, k in expected.items():
        policy.begin_step([_Running(i) for i in range(size)])
        assert policy.num_drafts(_Running(0)) == k


def test_the_coordinator_follows_a_table() -> None:
    config = group_config(num_speculative_tokens_per_batch_size=((1, 1, 3), (2, 2, 1), (3, 9, 0)))
    group = Group(config)
    for i in range(3):
        group.coordinator.submit(request(f"r{i}", max_tokens=30 * (i + 1)))
    group.run()
    greatest = {1: 0, 2: 0, 3: 0}
    for message in group.sent[1:]:
        greatest[len(message.k)] = max(greatest[len(message.k)], int(message.k[0]))
    assert greatest == {1: 3, 2: 1, 3: 0}


class _Clock:
    """Time passes by what the shards would need for the steps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.slow
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_in_the_coordinator(max_steps_in_flight) -> None:
    """Drafts of which a third hold, on a machine where rows are dear: k falls to 0; tokens stay the same."""
    clock = _Clock()
    config = group_config(
        dynamic_speculative_decoding=True, max_model_len=400, num_kv_blocks=2000, max_num_seqs=4
    )
    group = Group(config, clock=clock, max_steps_in_flight=max_steps_in_flight)
    assert isinstance(draft_policy_of(config), DynamicDrafts)
    plain = Group(group_config(max_model_len=400, num_kv_blocks=2000, num_speculative_tokens=0))
    for i in range(4):
        for one in (group, plain):
            one.coordinator.submit(request(f"r{i}", prompt=(1, 2, i), max_tokens=300))
    plain.run()
    while group.coordinator.has_work:
        while group.send():
            pass
        k = group.sent[-group.num_in_flight].k
        clock.now_s += 1 + 4 * len(k) + 4 * int(k.sum())
        group.report()
    assert [group.tokens(f"r{i}") for i in range(4)] == [plain.tokens(f"r{i}") for i in range(4)]
    late = [int(m.k.max()) for m in group.sent[60:250]]
    assert late.count(0) > 0.9 * len(late)
    stats = group.coordinator.stats()
    assert stats.last_k[0] == 4 or sum(stats.last_k) < 4
