"""How a shard joins the other ranks of its group."""

import os
import socket
from datetime import timedelta

import torch.distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from actors.shard_spec import CollectivesSpec
from actors.transport.network import host_and_port, interface_of
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives
from kernels_integration.collectives.torch_distributed import TorchCollectives
from kernels_integration.topology import Topology

# A collective waits at least as long as one rank may lag behind inside a step; a dead peer is found
# by heartbeats long before this.
_GLOO_TIMEOUT = timedelta(seconds=120)


def join_collectives(
    spec: CollectivesSpec, *, rank: int, topology: Topology, node_ip: str
) -> tuple[Collectives, Collectives]:
    """A rank's membership in the tensor-parallel set and in its DCP set.

    Waits for the other ranks. Both are the same object where the sets are equal. Called once an epoch.
    """
    size, dcp_size = topology.tp, topology.dcp
    if size == 1:
        solo = SoloCollectives()
        return solo, solo
    dcp_set, dcp_rank = topology.dcp_group(rank), topology.dcp_rank(rank)
    solo = SoloCollectives()
    if spec.kind == "shared_memory":
        tp = SharedMemoryCollectives(f"{spec.name}-tp", rank, size)
        if dcp_size in (1, size):
            return tp, solo if dcp_size == 1 else tp
        try:
            return tp, SharedMemoryCollectives(f"{spec.name}-dcp{dcp_set}", dcp_rank, dcp_size)
        except BaseException:
            tp.close()
            raise
    _init_gloo(spec, rank, size, node_ip)
    world = TorchCollectives(_gloo_group(range(size)))
    if dcp_size in (1, size):
        return world, solo if dcp_size == 1 else world
    # Every rank creates the group of every set, in the same order.
    groups = [_gloo_group(ranks) for ranks in topology.dcp_groups]
    return world, TorchCollectives(groups[dcp_set])


def _gloo_group(ranks: range) -> torch.distributed.ProcessGroup:
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(
        ranks, timeout=_GLOO_TIMEOUT, backend="gloo"
    )
    return group


def _init_gloo(spec: CollectivesSpec, rank: int, size: int, node_ip: str) -> None:
    interface = interface_of(node_ip)
    if interface is not None:
        # gloo would else resolve the host's name, which is often 127.0.0.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if torch.distributed.is_initialized():  # of an epoch that has ended
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", store=rendezvous(spec, rank, size), rank=rank, world_size=size, timeout=_GLOO_TIMEOUT
    )


def rendezvous(spec: CollectivesSpec, rank: int, size: int) -> Store:
    """Where the ranks tell each other their addresses; rank 0 hosts it.

    By itself torch would listen on all addresses of the node, and whoever connects could read and set every
    key. It listens where the group's nodes reach it, and keys begin with what only the group knows.
    """
    host, port = host_and_port(spec.init_method.removeprefix("tcp://"))
    is_host = rank == 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family).detach() if is_host else None
    store = TCPStore(
        host, port, size, is_host, _GLOO_TIMEOUT, wait_for_workers=False, master_listen_fd=listener
    )
    return PrefixStore(spec.name, store)
