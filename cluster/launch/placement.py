"""Where a group's actors go: one bundle per actor, as close together as the cluster allows."""

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.actor_process import Node
from actors.shard_spec import CollectivesSpec
from kernels_integration.errors import ClusterTooSmallError


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one actor needs."""

    actor: str
    num_cpus: float
    node_ip: str | None = None
    """The node that it must be on; None: any."""

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts them; each node has one of a resource that bears its address."""
        own_node = {} if self.node_ip is None else {f"node:{self.node_ip}": 0.001}
        return ({"CPU": self.num_cpus} if self.num_cpus else {}) | own_node

    def fits(self, node: "NodeCapacity", free: float) -> bool:
        """Whether the node is a right one and has that many CPUs left."""
        return free >= self.num_cpus and self.node_ip in (None, node.ip)

    def __str__(self) -> str:
        needs = [f"{self.num_cpus:g} CPU"] if self.num_cpus else []
        needs += [f"on node {self.node_ip}"] if self.node_ip is not None else []
        return f"{self.actor} ({', '.join(needs)})"


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """CPUs of one node: free now, and in all."""

    ip: str
    free: float
    total: float


def bundles_of(num_shards: int, cpus_of_shard: int = 1) -> list[Bundle]:
    """The coordinator's bundle, then one per shard."""
    shards = (Bundle(f"shard {rank}", cpus_of_shard) for rank in range(num_shards))
    return [Bundle("the coordinator", 1), *shards]


def gateway_bundle(node_id: str) -> Bundle:
    """A gateway listens on this machine's addresses, and waits for sockets: it takes no CPU of the account.

    A head that was started with --num-cpus 0, or a node that the group fills, has room for it.
    """
    [ip] = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id]
    return Bundle("the gateway", 0, node_ip=ip)


def reserve(
    bundles: Sequence[Bundle], *, name: str, timeout_s: float, progress: Callable[[str], None]
) -> PlacementGroup:
    """Reserve every bundle, or none. name: what `ray list placement-groups` shows.

    Errors: ClusterTooSmallError after timeout_s, with the bundle that is missing and what each node has.
    """
    group = placement_group([bundle.resources for bundle in bundles], strategy="PACK", name=name)
    start_s = time.monotonic()
    try:
        while not group.wait(timeout_seconds=1):
            waited_s = time.monotonic() - start_s
            shortage = describe_shortage(bundles, node_capacities())
            if waited_s >= timeout_s:
                raise ClusterTooSmallError(
                    f"the Ray cluster could not place the group within {timeout_s:g} s: {shortage}; "
                    "add nodes, free CPUs, lower --tensor-parallel-size, or wait longer "
                    "(--placement-timeout)"
                    f"{table(bundles, node_capacities())}"
                )
            progress(f"waiting for room in the Ray cluster ({waited_s:.0f} s): {shortage}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def node_capacities() -> list[NodeCapacity]:
    """The live nodes of the cluster that this driver is connected to."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeCapacity(
            ip=node["NodeManagerAddress"],
            free=free.get(node["NodeID"], {}).get("CPU", 0.0),
            total=node["Resources"].get("CPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def describe_shortage(bundles: Sequence[Bundle], nodes: Sequence[NodeCapacity]) -> str:
    """Which bundle finds no room when they are placed one after the other, and what each node has."""
    left = {index: node.free for index, node in enumerate(nodes)}
    have = ", ".join(f"node {node.ip} has {node.free:g} of {node.total:g} CPUs free" for node in nodes)
    for number, bundle in enumerate(bundles):
        index = next((i for i, free in left.items() if bundle.fits(nodes[i], free)), None)
        if index is None:
            return (
                f"{len(bundles)} bundles are needed, {number} fit, and the one of {bundle} fits on no node: "
                f"{have}"
            )
        left[index] -= bundle.num_cpus
    return f"all {len(bundles)} bundles should fit now: {have}"


def table(bundles: Sequence[Bundle], nodes: Sequence[NodeCapacity]) -> str:
    """Lines for people: every bundle that is wanted, and every node with what it has."""
    wanted = [f"  wanted  {bundle}" for bundle in bundles]
    had = [f"  node {node.ip}  {node.free:g} of {node.total:g} CPUs free" for node in nodes]
    return "".join(f"\n{line}" for line in (*wanted, *had))


def rank_order(coordinator: Node, shards: Sequence[Node]) -> list[int]:
    """Indices of shards in the order of their ranks: whole nodes after each other (DCP groups are
    consecutive ranks), the coordinator's first (rank 0 reports to it)."""
    return sorted(
        range(len(shards)),
        key=lambda i: (shards[i].node_id != coordinator.node_id, shards[i].node_id, i),
    )


def choose_collectives(
    shards: Sequence[Node],
    *,
    name: str,
    can_share_memory: Callable[[], bool],
    free_port: Callable[[], int],
) -> CollectivesSpec:
    """How the shards (by rank) talk: shared memory inside one node, gloo between nodes.

    Both callables ask the node of rank 0, and only if the answer matters.
    """
    if len(shards) == 1:
        return CollectivesSpec(kind="solo")
    if len({shard.node_id for shard in shards}) == 1 and can_share_memory():
        return CollectivesSpec(kind="shared_memory", name=name)
    init_method = f"tcp://{shards[0].ip}:{free_port()}"
    return CollectivesSpec(kind="gloo", name=secrets.token_hex(16), init_method=init_method)


def by_node(actors: Mapping[str, Node]) -> dict[str, str]:
    """By address, what runs there: {"10.0.0.1": "coordinator, shards 0-3", "10.0.0.2": "shard 4"}."""
    names: dict[str, list[str]] = {}
    for name, node in actors.items():
        names.setdefault(node.ip, []).append(name)
    return {ip: ", ".join(_with_ranges(of_node)) for ip, of_node in names.items()}


def count_by_node(actors: Mapping[str, Node]) -> str:
    """'10.0.0.1 (coordinator, shard 0), 10.0.0.2 (shard 1)', for people."""
    return ", ".join(f"{ip} ({names})" for ip, names in by_node(actors).items())


def _with_ranges(names: Sequence[str]) -> list[str]:
    """With "shard 2", "shard 3", "shard 4" as "shards 2-4"; those of each group by themselves."""
    others: list[str] = []
    ranks: dict[str, list[int]] = {}
    for name in names:
        of_group, is_shard, rank = name.rpartition("shard ")
        if is_shard:
            ranks.setdefault(of_group, []).append(int(rank))
        else:
            others.append(name)
    for of_group, its_ranks in ranks.items():
        numbers = enumerate(sorted(its_ranks))
        for _, numbered in itertools.groupby(numbers, key=lambda pair: pair[1] - pair[0]):
            run = [rank for _, rank in numbered]
            text = f"shard {run[0]}" if len(run) == 1 else f"shards {run[0]}-{run[-1]}"
            others.append(of_group + text)
    return others
