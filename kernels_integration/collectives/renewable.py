"""A place in a set of ranks that outlives the set: what was built with it goes on with the next one."""

from torch import Tensor

from kernels_integration.collectives import Collectives


class RenewableCollectives:
    """Rank and size are those of the first set and stay; `renew` puts another in its place.

    For one thread: nobody may be inside an operation when the set is renewed.
    """

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def renew(self, comm: Collectives) -> None:
        """Go on in a new set, whose ranks are those of the old one."""
        assert (comm.rank, comm.size) == (self.rank, self.size), "a rank keeps its place"
        self._comm = comm

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._comm.all_to_all(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._comm.reduce_scatter(x)

    def close(self) -> None:
        self._comm.close()
