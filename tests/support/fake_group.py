"""A coordinator and a fake shard joined, with messages that really cross the wire format."""

from collections import Counter, deque

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.coordinator.draft_policy import StaticDrafts
from actors.messages import StepInput, StepOutput, decode_input, decode_output, encode
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.sampling_params import SamplingParams
from tests.support.fake_shard import FakeShard, sometimes_right


def group_config(**changes) -> GroupConfig:
    values = {
        "num_speculative_tokens": 3,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_kv_blocks": 64,
    }
    return GroupConfig(
        model_path="", served_model_name="fake", dtype="float32", kv_cache_dtype="float32", **values | changes
    )


def request(
    request_id="r", prompt=(1, 2, 3), *, seed=5, eos=(), cache_salt=None, priority=0, **params
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=eos,
        cache_salt=cache_salt,
        priority=priority,
    )


class Group:
    def __init__(self, config=None, *, draft=sometimes_right, draft_policy=None, **kwargs) -> None:
        """draft_policy: a DraftPolicy, or a function of the request."""
        self.config = config or group_config()
        policy = StaticDrafts(draft_policy) if callable(draft_policy) else draft_policy
        self.coordinator = Coordinator(self.config, draft_policy=policy, **kwargs)
        self.shard = FakeShard(self.config, draft)
        self.updates: list[RequestUpdate | RequestFailed] = []
        self.sent: list[StepInput] = []
        self._unanswered: deque[tuple[StepInput, set[int]]] = deque()
        """Messages in flight, each with the blocks that were published when it was sent."""

    @property
    def num_in_flight(self) -> int:
        return len(self._unanswered)

    def send(self) -> bool:
        """Schedule one step; the message is now in flight."""
        num_preemptions = self.coordinator.stats().num_preemptions
        message = self.coordinator.schedule()
        if message is not None:
            has_preempted = self.coordinator.stats().num_preemptions > num_preemptions
            if has_preempted and self.config.scheduling_policy == "fcfs":
                assert not message.admit, "a step that preempts must not admit"
            self.sent.append(decode_input(encode(message)))
            self._unanswered.append((self.sent[-1], self._published()))
        return message is not None

    def execute(self) -> StepOutput:
        """The shards run the oldest message in flight."""
        message, published = self._unanswered.popleft()
        return decode_output(encode(self.shard.execute(message, published | self._published())))

    def report(self) -> None:
        self.coordinator.process(self.execute())
        self.updates += self.coordinator.take_updates()

    def restart(self, epoch: int) -> None:
        """Of new shards; what the old ones still report is dropped."""
        late = [self.execute() for _ in range(self.num_in_flight)]
        self.coordinator.restart(epoch)
        for output in late:
            self.coordinator.process(output)
        self.shard.lose_state()

    def run(self, max_steps=10_000) -> None:
        """Until nothing is live; as many steps in flight as may be, and always one."""
        for _ in range(max_steps):
            while self.send():
                pass
            if not self.num_in_flight:
                assert not self.coordinator.has_work, "live requests, but nothing was scheduled"
                return
            self.report()
        raise AssertionError(f"{max_steps} steps and still busy")

    def _published(self) -> set[int]:
        return set(self.coordinator._blocks._hash_of)

    def tokens(self, request_id="r") -> list[int]:
        return [t for u in self.updates_of(request_id) if isinstance(u, RequestUpdate) for t in u.token_ids]

    def updates_of(self, request_id="r") -> list[RequestUpdate | RequestFailed]:
        return [u for u in self.updates if u.request_id == request_id]

    def check_blocks(self) -> None:
        """Every block is free or in live tables; only published ones are in several, or kept when free."""
        blocks = self.coordinator._blocks
        holders = Counter(b for table in blocks._tables.values() for b in table)
        free = list(blocks._blank) + list(blocks._kept)
        assert sorted([*holders, *free]) == list(range(blocks.num_blocks))
        assert [holders[b] for b in range(blocks.num_blocks)] == blocks._num_holders
        assert all(b in blocks._hash_of for b, n in holders.items() if n > 1)
        assert {h: b for b, h in blocks._hash_of.items()} == blocks._block_of
        assert set(blocks._kept) == set(blocks._hash_of) - set(holders)
        running = self.coordinator._scheduler.running
        assert set(blocks._tables) == {r.admission for r in running}
        slots = [r.slot for r in running] + self.coordinator._scheduler._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs))
