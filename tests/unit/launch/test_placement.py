"""Placement decisions as values: what is missing, which rank goes where, how shards talk."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.actor_process import Node
from actors.config import GroupConfig
from actors.model_location import to_local, to_portable
from actors.transport.network import free_port, interface_of
from cluster.launch.placement import (
    Bundle,
    NodeCapacity,
    bundles_of,
    by_node,
    choose_collectives,
    count_by_node,
    describe_shortage,
    rank_order,
    table,
)


def node(name: str) -> Node:
    return Node(node_id=name, ip=f"10.0.0.{ord(name)}")


def test_one_bundle_per_actor() -> None:
    assert [bundle.actor for bundle in bundles_of(2)] == ["the coordinator", "shard 0", "shard 1"]


def test_the_shortage_names_the_bundle_and_every_node() -> None:
    nodes = [NodeCapacity("10.0.0.1", free=2, total=8), NodeCapacity("10.0.0.2", free=0.5, total=2)]
    text = describe_shortage(bundles_of(4), nodes)
    assert "5 bundles are needed, 2 fit, and the one of shard 1 (1 CPU) fits on no node" in text
    assert "node 10.0.0.1 has 2 of 8 CPUs free, node 10.0.0.2 has 0.5 of 2 CPUs free" in text


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 8))
def test_a_shortage_is_told_exactly_when_there_is_one(free: list[int], num_shards: int) -> None:
    nodes = [NodeCapacity(f"n{i}", free=cpus, total=4) for i, cpus in enumerate(free)]
    fits = sum(free) >= num_shards + 1  # bundles of one CPU each
    assert ("fits on no node" in describe_shortage(bundles_of(num_shards), nodes)) != fits


def test_ranks_fill_whole_nodes_the_coordinators_first() -> None:
    shards = [node(name) for name in "babcb"]
    order = rank_order(node("b"), shards)
    assert [shards[index].node_id for index in order] == ["b", "b", "b", "a", "c"]
    assert sorted(order) == list(range(5))


@pytest.mark.parametrize(
    ("nodes", "shares", "kind"),
    [("a", True, "solo"), ("aa", True, "shared_memory"), ("aa", False, "gloo"), ("ab", True, "gloo")],
)
def test_collectives_follow_placement(nodes: str, shares: bool, kind: str) -> None:
    spec = choose_collectives(
        [node(name) for name in nodes], name="x", can_share_memory=lambda: shares, free_port=lambda: 5
    )
    assert spec.kind == kind
    assert spec.init_method == (f"tcp://{node('a').ip}:5" if kind == "gloo" else "")


def test_a_bundled_checkpoint_travels_by_name_and_others_by_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cluster

    bundled = Path(cluster.__file__).parent / "assets" / "tiny-dsa"
    config = GroupConfig(
        model_path=str(bundled),
        served_model_name="m",
        max_model_len=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        block_size=1,
        num_kv_blocks=1,
        dtype="float32",
        kv_cache_dtype="float32",
    )
    portable = to_portable(config, "cluster")
    assert portable.model_path == "package:cluster/assets/tiny-dsa"
    assert to_local(portable) == config
    monkeypatch.chdir(tmp_path)
    other = to_portable(dataclasses.replace(config, model_path="models/x"), "cluster")
    assert other.model_path == str(tmp_path / "models/x")
    assert to_local(other) == other


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    assert 1024 <= free_port("127.0.0.1") < 65536


def test_actors_by_node_fit_a_line_also_for_many_shards() -> None:
    first, second = Node(node_id="a", ip="10.0.0.1"), Node(node_id="b", ip="10.0.0.2")
    actors = {"coordinator": first} | {f"shard {rank}": first if rank < 8 else second for rank in range(10)}
    actors["shard 12"] = first
    assert by_node(actors) == {
        "10.0.0.1": "coordinator, shards 0-7, shard 12",
        "10.0.0.2": "shards 8-9",
    }
    assert count_by_node({"shard 0": second}) == "10.0.0.2 (shard 0)"


def test_a_gateway_fits_on_its_own_node_alone_and_takes_no_cpu() -> None:
    gateway = Bundle("the gateway", 0, node_ip="10.0.0.1")
    assert gateway.resources == {"node:10.0.0.1": 0.001}
    assert str(gateway) == "the gateway (on node 10.0.0.1)"
    full = [NodeCapacity("10.0.0.1", free=3, total=3)]
    assert "should fit now" in describe_shortage([*bundles_of(2), gateway], full)
    head = [NodeCapacity("10.0.0.1", free=0, total=0), NodeCapacity("10.0.0.2", free=2, total=2)]
    assert "should fit now" in describe_shortage([*bundles_of(1), gateway], head)
    elsewhere = [NodeCapacity("10.0.0.2", free=8, total=8)]
    told = describe_shortage([*bundles_of(1), gateway], elsewhere)
    assert "the one of the gateway (on node 10.0.0.1) fits on no node" in told


def test_the_table_has_every_bundle_and_every_node() -> None:
    nodes = [NodeCapacity("10.0.0.1", free=2, total=8), NodeCapacity("10.0.0.2", free=0, total=0)]
    assert table([*bundles_of(1), Bundle("the gateway", 0, node_ip="10.0.0.1")], nodes).splitlines() == [
        "",
        "  wanted  the coordinator (1 CPU)",
        "  wanted  shard 0 (1 CPU)",
        "  wanted  the gateway (on node 10.0.0.1)",
        "  node 10.0.0.1  2 of 8 CPUs free",
        "  node 10.0.0.2  0 of 0 CPUs free",
    ]
