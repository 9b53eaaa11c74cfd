"""Where ranks of several nodes meet: on the group's own address, under keys that only the group knows."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.shard_spec import CollectivesSpec
from actors.transport.collectives import rendezvous
from actors.transport.network import free_port


def test_ranks_meet_and_strangers_find_nothing() -> None:
    port = free_port("127.0.0.1")
    spec = CollectivesSpec(kind="gloo", name="a secret", init_method=f"tcp://127.0.0.1:{port}")
    first, second = (rendezvous(spec, rank, 2) for rank in range(2))
    first.set("address of 0", "here")
    assert second.get("address of 0") == b"here"
    stranger = TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=0.2), wait_for_workers=False)
    assert not stranger.check(["address of 0"])
    stranger.set("address of 0", "elsewhere")
    assert second.get("address of 0") == b"here"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)  # another address of this machine


def test_the_secret_is_not_shown() -> None:
    assert "a secret" not in repr(CollectivesSpec(kind="gloo", name="a secret"))
