"""What a shard is started with: plain data. Importing it needs no torch."""

from dataclasses import dataclass
from typing import Literal

from actors.config import GroupConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesSpec:
    """How the shards of a group talk inside a step; chosen from their placement."""

    kind: Literal["solo", "shared_memory", "gloo"]
    name: str = ""
    """shared_memory: the prefix of the segments' names, unique on the node."""
    init_method: str = ""
    """gloo: tcp://HOST:PORT of the rendezvous, which rank 0 hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Everything a shard needs to start: plain data."""

    config: GroupConfig
    tp_rank: int
    epoch: int
    step_address: str
    collectives: CollectivesSpec
    node_ip: str
    num_threads: int = 1
