"""Routing and admission of a large cluster, without its engines: how fast, how even, how often cached.

    python -m benchmarks.routing_simulation [--nodes 1000] [--rate 10000] [--gateways 10] [--seconds 2]

A group on each node with slots, a queue and a prefix cache of so many beginnings; time is simulated, the code
that decides (`Groups.choose`, `admission.refusal`) is the gateways' own. Each gateway sees what the groups'
heartbeats told it, every half second, and what it has sent itself. Prompts share beginnings by Zipf's law.
Times are the processor's, so that other processes do not count.
"""

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from actors.requests import Request, SequenceKey
from actors.sampling_params import SamplingParams
from actors.stats import GroupStats, PhaseTimes, QueuePart
from benchmarks import harness
from cluster.answering.admission import Asked, Limits, refusal
from cluster.answering.group import Deliver, Groups

BEAT_S = 0.5
SLOTS = 64
SERVICE_S = 5.0
CACHED_BEGINNINGS = 64
BEGINNING_TOKENS = 256
PARAMS = SamplingParams(max_tokens=256)


class SimulatedGroup:
    """Implements what `Groups` needs of a Group."""

    def __init__(self) -> None:
        self.healthy = True
        self.is_recovering = False
        self.message = ""
        self.stats: GroupStats | None = GroupStats(num_slots=SLOTS)
        self.num_running = 0
        self.num_given = 0
        self.num_finished = 0
        self.waiting: deque[tuple[float, int, SequenceKey]] = deque()
        self.cache: OrderedDict[int, None] = OrderedDict()

    def has_cached(self, beginning: int) -> bool:
        found = beginning in self.cache
        self.cache[beginning] = None
        self.cache.move_to_end(beginning)
        if len(self.cache) > CACHED_BEGINNINGS:
            self.cache.popitem(last=False)
        return found

    def beat(self, num_gateways: int) -> None:
        num_waiting = len(self.waiting)
        part = QueuePart(num_requests=num_waiting, num_tokens=num_waiting * BEGINNING_TOKENS)
        self.stats = GroupStats(
            num_slots=SLOTS,
            running=self.num_running,
            waiting=num_waiting,
            num_generated_tokens=self.num_finished * 128,
            phases=PhaseTimes(num_finished=self.num_finished, decode_s=self.num_finished * SERVICE_S),
            queue=(part,) if num_waiting else (),
            num_front_ends=num_gateways,
        )

    def submit(self, request: Request, deliver: Deliver) -> None: ...

    def abort(self, keys: Iterable[SequenceKey]) -> None: ...

    async def connect(self) -> None: ...

    async def current_stats(self) -> GroupStats:
        assert self.stats is not None
        return self.stats

    async def close(self) -> None: ...


def arrivals(
    rng: random.Random, *, rate: float, seconds: float, num_beginnings: int
) -> Iterator[tuple[float, int]]:
    """(time, which beginning), by Poisson and Zipf."""
    weights = [1 / rank for rank in range(1, num_beginnings + 1)]
    total = list(itertools.accumulate(weights))
    now_s = rng.expovariate(rate)
    while now_s < seconds:
        yield now_s, rng.choices(range(num_beginnings), cum_weights=total)[0]
        now_s += rng.expovariate(rate)


def simulate(flags: argparse.Namespace) -> None:
    rng = random.Random(1)
    groups = [SimulatedGroup() for _ in range(flags.nodes)]
    gateways = [Groups(groups) for _ in range(flags.gateways)]
    limits = Limits(max_queued_requests=4 * flags.nodes)
    prompts = [tuple(rng.randrange(1000) for _ in range(BEGINNING_TOKENS)) for _ in range(flags.beginnings)]
    departures: list[tuple[float, int, int, SequenceKey]] = []
    """(time, group, gateway, sequence)."""
    next_beat_s, decide_s = 0.0, 0.0
    num_hits = num_refused = num_decided = 0
    slowest_s = 0.0

    def begin(now_s: float, number: int, gateway: int, key: SequenceKey) -> None:
        groups[number].num_running += 1
        heapq.heappush(departures, (now_s + rng.expovariate(1 / SERVICE_S), number, gateway, key))

    def pass_until(now_s: float) -> None:
        while departures and departures[0][0] <= now_s:
            at_s, number, gateway, key = heapq.heappop(departures)
            group = groups[number]
            group.num_running -= 1
            group.num_finished += 1
            gateways[gateway].left(group, key)
            if group.waiting:
                _, its_gateway, its_key = group.waiting.popleft()
                begin(at_s, number, its_gateway, its_key)

    places = {id(group): number for number, group in enumerate(groups)}
    # begin as a cluster that has served for a while, so that the queue's pace is known
    for number, group in enumerate(groups):
        for index in range(int(SLOTS * flags.filled)):
            key = SequenceKey("before", number, index)
            request = _request(key, prompts[0])
            gateways[number % flags.gateways].took(group, request)
            begin(0.0, number, number % flags.gateways, key)
        group.num_finished = 100
    for index, (now_s, beginning) in enumerate(
        arrivals(rng, rate=flags.rate, seconds=flags.seconds, num_beginnings=flags.beginnings)
    ):
        pass_until(now_s)
        if now_s >= next_beat_s:
            next_beat_s += BEAT_S
            for group in groups:
                group.beat(flags.gateways)
        of = rng.randrange(flags.gateways)
        key = SequenceKey("r", index)
        request = _request(key, prompts[beginning])
        asked = Asked(num_requests=1, num_tokens=BEGINNING_TOKENS, max_tokens=256, time_left_s=30.0)
        start_s = time.process_time()
        refused = refusal(asked, gateways[of].queues(), limits)
        chosen = gateways[of].choose(request) if refused is None else None
        took_s = time.process_time() - start_s
        decide_s, slowest_s, num_decided = decide_s + took_s, max(slowest_s, took_s), num_decided + 1
        if chosen is None:
            num_refused += 1
            continue
        gateways[of].took(chosen, request)
        group = groups[places[id(chosen)]]
        group.num_given += 1
        num_hits += group.has_cached(beginning)
        if group.num_running < SLOTS:
            begin(now_s, places[id(chosen)], of, key)
        else:
            group.waiting.append((now_s, of, key))
    given = [group.num_given for group in groups]
    loads = [group.num_running + len(group.waiting) for group in groups]
    num_taken = num_decided - num_refused
    print(
        f"{num_decided} requests by {flags.gateways} gateways to {flags.nodes} groups: "
        f"{num_decided / decide_s:.0f} decisions/s a process, {decide_s / num_decided * 1e6:.0f} us each, "
        f"slowest {slowest_s * 1e3:.1f} ms"
    )
    print(f"refused {num_refused / num_decided:.1%}; beginning cached {num_hits / max(num_taken, 1):.1%}")
    print(
        f"requests given to a group: mean {statistics.mean(given):.1f}, most {max(given)}; at the end there "
        f"run or wait: mean {statistics.mean(loads):.1f}, most {max(loads)}, standard deviation "
        f"{statistics.pstdev(loads):.1f}"
    )


def _request(key: SequenceKey, prompt: tuple[int, ...]) -> Request:
    return Request(
        request_id=key.request_id,
        incarnation=key.incarnation,
        index=key.index,
        prompt_token_ids=prompt,
        params=PARAMS,
        seed=0,
        eos_token_ids=(),
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=10_000, help="requests a second")
    parser.add_argument("--gateways", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="of simulated time")
    parser.add_argument("--beginnings", type=int, default=5000)
    parser.add_argument("--filled", type=float, default=0.7, help="slots in use at the start")
    flags = parser.parse_args()
    print(harness.machine())
    simulate(flags)


if __name__ == "__main__":
    main()
