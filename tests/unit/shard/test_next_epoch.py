"""A shard that outlives a peer joins the next epoch as it is, at whatever operation the other one died."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.coordinator.coordinator import Coordinator
from actors.messages import StepOutput
from actors.requests import Request, RequestUpdate
from actors.shard.build import build_shard
from actors.shard.shard import Shard
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.collectives.renewable import RenewableCollectives
from kernels_integration.errors import CollectiveError
from tests.support.groups import InlineGroup, group_config, request, run, text_prompts

CONFIG = group_config(
    tensor_parallel_size=2, num_speculative_tokens=3, max_num_batched_tokens=48, num_kv_blocks=64
)
ASKED = [
    request(f"r{i}", prompt, seed=i, max_tokens=16, temperature=0.8 * (i % 2))
    for i, prompt in enumerate(text_prompts([9, 40, 70]))
]


class KilledError(Exception):
    """What a killed process does not live to tell."""


class Mortal:
    """Collectives of a rank that dies at its num_calls-th operation."""

    def __init__(self, comm: Collectives, num_calls: int) -> None:
        self._comm = comm
        self._num_left = num_calls
        self.rank, self.size = comm.rank, comm.size

    def _living(self) -> Collectives:
        self._num_left -= 1
        if self._num_left == 0:
            self._comm.close()
            raise KilledError
        return self._comm

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._living().all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._living().all_gather(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._living().all_to_all(x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._living().reduce_scatter(x)

    def close(self) -> None:
        self._comm.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    group = InlineGroup(CONFIG)
    tokens = {name: found.token_ids for name, found in run(group, ASKED).items()}
    group.close()
    return tokens


def tokens_with_deaths(asked: list[Request], deaths: list[int]) -> dict[str, list[int]]:
    """Rank 1 dies at the given operations, each counted from the epoch's first; rank 0 is kept."""
    coordinator = Coordinator(CONFIG)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in asked}
    for one in asked:
        coordinator.submit(one)
    places = [RenewableCollectives(comm) for comm in InProcessCollectives.create(2)]
    with ThreadPoolExecutor(2) as pool:
        shards = list(pool.map(build, places))
    left = list(deaths)
    places[1].renew(Mortal(places[1]._comm, left.pop(0)))
    epoch = 0
    with ThreadPoolExecutor(2) as pool:
        while coordinator.has_work:
            step = coordinator.schedule()
            assert step is not None
            reports: list[StepOutput] = []
            running = [pool.submit(shard.execute, step, reports.append) for shard in shards]
            errors = [future.exception() for future in running]
            for error in errors:
                assert error is None or isinstance(error, CollectiveError | KilledError), error
            if reports:
                coordinator.process(reports[0])
                for update in coordinator.take_updates():
                    assert isinstance(update, RequestUpdate)
                    tokens[update.request_id] += update.token_ids
            if any(errors):
                epoch += 1
                coordinator.restart(epoch)
                first, second = InProcessCollectives.create(2)
                places[0].renew(first)
                places[1] = RenewableCollectives(Mortal(second, left.pop(0)) if left else second)
                rejoining = pool.submit(shards[0].rejoin)
                shards[1] = build(places[1])
                rejoining.result()
    assert epoch == len(deaths)
    return tokens


def build(place: RenewableCollectives) -> Shard:
    shard = build_shard(CONFIG, tp=place, dcp_comm=SoloCollectives())
    assert isinstance(shard, Shard)
    return shard


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [[3], [31], [200, 50, 7]])
def test_streams_do_not_show_at_which_operation_a_peer_died(
    undisturbed: dict[str, list[int]], deaths: list[int]
) -> None:
    assert tokens_with_deaths(ASKED, deaths) == undisturbed
