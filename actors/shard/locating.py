"""Where a plan was wrong: every kind of shard says step and rank, the model says the layer."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels_integration.errors import PlanError


@contextmanager
def locating(step: int, rank: int) -> Iterator[None]:
    """A PlanError inside tells the step and the rank that it comes from."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"step {step}, rank {rank}: {error}") from error
