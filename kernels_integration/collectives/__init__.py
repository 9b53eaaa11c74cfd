"""The seam through which the shards of a group talk inside a step."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """A set of ranks. Every rank calls the same operations in the same order, with equal shapes.

    Errors: CollectiveError when a peer is gone or does not arrive in time.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order: the same bits on every rank.

        May overwrite x; use the returned tensor.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: entry r is rank r's x."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...]: entry r of the result is entry `rank` of rank r's x."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size, ...]: the sum over ranks, in rank order, of their entries `rank`."""
        ...

    def close(self) -> None: ...


class SoloCollectives:
    """A set of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def close(self) -> None:
        pass
