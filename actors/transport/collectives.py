"""How a shard joins the other ranks of its group."""

import os
from datetime import timedelta

import torch.distributed

from actors.shard_spec import CollectivesSpec
from actors.transport.network import interface_of
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives
from kernels_integration.collectives.torch_distributed import TorchCollectives

# A collective waits at least as long as one rank may lag behind inside a step; a dead peer is found
# by heartbeats long before this.
_GLOO_TIMEOUT = timedelta(seconds=120)


def join_collectives(
    spec: CollectivesSpec, *, rank: int, size: int, dcp_size: int, node_ip: str
) -> tuple[Collectives, Collectives]:
    """A rank's membership in the tensor-parallel set and in its DCP set (dcp_size consecutive ranks).

    Waits for the other ranks. Both are the same object where the sets are equal.
    """
    if size == 1:
        solo = SoloCollectives()
        return solo, solo
    dcp_set, dcp_rank = divmod(rank, dcp_size)
    if spec.kind == "shared_memory":
        tp: Collectives = SharedMemoryCollectives(f"{spec.name}-tp", rank, size)
    else:
        tp = TorchCollectives(_join_gloo(spec.init_method, rank, size, node_ip))
    if dcp_size == size:
        return tp, tp
    if dcp_size == 1:
        return tp, SoloCollectives()
    if spec.kind == "shared_memory":
        return tp, SharedMemoryCollectives(f"{spec.name}-dcp{dcp_set}", dcp_rank, dcp_size)
    subgroups = [  # every rank creates every subgroup, in the same order
        torch.distributed.new_group(range(first, first + dcp_size), timeout=_GLOO_TIMEOUT, backend="gloo")
        for first in range(0, size, dcp_size)
    ]
    return tp, TorchCollectives(subgroups[dcp_set])


def _join_gloo(init_method: str, rank: int, size: int, node_ip: str) -> torch.distributed.ProcessGroup:
    interface = interface_of(node_ip)
    if interface is not None:
        # gloo would else resolve the host's name, which is often 127.0.0.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.distributed.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=size, timeout=_GLOO_TIMEOUT
    )
    world = torch.distributed.group.WORLD
    assert world is not None, "initialised above"
    return world
