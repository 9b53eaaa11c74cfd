"""What a shard is started with: plain data. Importing it needs no torch."""

from dataclasses import dataclass, field
from typing import Literal

from actors.config import GroupConfig
from actors.transport.channel_keys import MemberKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesSpec:
    """How the shards of a group talk inside a step; chosen from their placement."""

    kind: Literal["solo", "shared_memory", "gloo"]
    name: str = field(default="", repr=False)
    """shared_memory: the prefix of the segments' names, unique on the node. gloo: that of the
    rendezvous' keys, a secret."""
    init_method: str = ""
    """gloo: tcp://HOST:PORT of the rendezvous, which rank 0 hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Everything a shard needs to start: plain data."""

    config: GroupConfig
    tp_rank: int
    epoch: int
    step_address: str
    step_keys: MemberKeys | None = None
    """None: the coordinator lets everybody in, in tests."""
    collectives: CollectivesSpec
    node_ip: str
    num_threads: int = 1
