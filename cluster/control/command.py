"""One order to a running server, as it travels."""

from typing import Literal

import msgspec

SERVICE = "latentray.Control"
METHOD = "CarryOut"
"""A Command comes in; texts go out as it proceeds. Both are JSON: no other program speaks this."""


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done with which groups."""

    do: Literal["drain", "undrain", "restart"]
    where: str | None = None
    """A group's number, or a node's address: the groups with a process there. None: all groups, one after the
    other; for restart alone."""
    drain_s: float | None = None
    """How long requests that cannot go on elsewhere may take to end; None: as long as they do."""
    model: str | None = None
    """restart: the checkpoint that is served from then on; None: the one that is."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A line for the operator."""

    text: str
