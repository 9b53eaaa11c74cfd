"""All ranks of a group compute alike: what they replicate would else differ between them."""

import torch

from kernels_integration.backend import Backend
from kernels_integration.collectives import Collectives
from kernels_integration.errors import ConfigError

_ARITHMETIC_BYTES = 64


def require_one_arithmetic(backend: Backend, tp: Collectives) -> None:
    """One collective of all ranks, whenever one joins. Errors: ConfigError, on every rank."""
    if tp.size == 1:
        return
    words = torch.frombuffer(
        bytearray(backend.arithmetic.encode().ljust(_ARITHMETIC_BYTES)), dtype=torch.int64
    )
    gathered = tp.all_gather(words.to(backend.device)).cpu()
    names = [row.numpy().tobytes().decode().strip() for row in gathered]
    if len(set(names)) > 1:
        listed = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ConfigError(
            f"the shards would not compute alike ({listed}): their nodes differ in processor or C compiler; "
            "use --attention-backend torch, or like nodes"
        )
