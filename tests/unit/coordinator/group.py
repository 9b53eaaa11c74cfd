"""A coordinator and a fake shard joined, with messages that really cross the wire format."""

from fake_shard import FakeShard, sometimes_right

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.messages import StepInput, decode_input, decode_output, encode
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.sampling_params import SamplingParams


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


def request(request_id="r", prompt=(1, 2, 3), *, seed=5, eos=(), **params) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=eos,
    )


class Group:
    def __init__(self, config=None, *, draft=sometimes_right, **kwargs) -> None:
        self.config = config or group_config()
        self.coordinator = Coordinator(self.config, **kwargs)
        self.shard = FakeShard(self.config, draft)
        self.updates: list[RequestUpdate | RequestFailed] = []
        self.sent: list[StepInput] = []

    def send(self) -> bool:
        """Schedule one step; the message is now in flight."""
        num_preemptions = self.coordinator.stats().num_preemptions
        message = self.coordinator.schedule()
        if message is not None:
            if self.coordinator.stats().num_preemptions > num_preemptions:
                assert not message.admit, "a step that preempts must not admit"
            self.sent.append(decode_input(encode(message)))
        return message is not None

    def report(self) -> None:
        output = decode_output(encode(self.shard.execute(self.sent[-1])))
        self.coordinator.process(output)
        self.updates += self.coordinator.take_updates()

    def run(self, max_steps=10_000) -> None:
        """Until nothing is live; every call must find something to run."""
        for _ in range(max_steps):
            if not self.coordinator.has_work:
                return
            assert self.send(), "live requests, but nothing was scheduled"
            self.report()
        raise AssertionError(f"{max_steps} steps and still busy")

    def tokens(self, request_id="r") -> list[int]:
        return [t for u in self.updates_of(request_id) if isinstance(u, RequestUpdate) for t in u.token_ids]

    def updates_of(self, request_id="r") -> list[RequestUpdate | RequestFailed]:
        return [u for u in self.updates if u.request_id == request_id]

    def check_blocks(self) -> None:
        """Every block is free or in exactly one live table."""
        blocks = self.coordinator._blocks
        owned = [b for table in blocks._tables.values() for b in table]
        assert sorted(owned + list(blocks._free)) == list(range(blocks.num_blocks))
        running = self.coordinator._scheduler.running
        assert set(blocks._tables) == {r.admission for r in running}
        slots = [r.slot for r in running] + self.coordinator._scheduler._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs))
