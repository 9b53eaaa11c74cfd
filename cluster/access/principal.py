"""Who asks: the owner of the API key of the call that the current task answers."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant, as the file of keys names it. Ids of requests are its own: others cannot see or end them."""

    tenant: str = ""
    """Empty where the server asks for no key: all clients are one."""
    is_operator: bool = True
    """Whether it may give orders: drain, restart."""
    max_requests: int | None = None
    """How many of its requests run or wait at the same time at one gateway; None: any number."""


ANYBODY = Principal()
"""Everybody, where there are no keys."""

_current: ContextVar[Principal] = ContextVar("principal", default=ANYBODY)


def current_principal() -> Principal:
    """Of the call that this task answers. gRPC hands its handlers nothing else from an interceptor."""
    return _current.get()


def set_principal(principal: Principal) -> None:
    """Until the task's next call, which sets its own."""
    _current.set(principal)
