"""Orders in a gateway's process, which wait for who holds the groups to fetch them."""

import asyncio
from collections.abc import AsyncIterator

from cluster.control.command import Command
from cluster.errors import from_code
from kernels_integration.errors import OverloadedError


class ControlDesk:
    """One order at a time. Used in one event loop; who carries orders out calls `fetch`, `say` and `end`."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[Command] = asyncio.Queue()
        self._said: asyncio.Queue[str | Exception | None] | None = None
        """Of the order that is carried out; None: none is."""
        self._doing = ""

    async def carry_out(self, command: Command) -> AsyncIterator[str]:
        """What is said while it is carried out, to its end; who leaves before lets it go on.

        Errors: OverloadedError while another is carried out; what keeps it from being carried out.
        """
        if self._said is not None:
            raise OverloadedError(f"{self._doing} goes on; ask again when it has ended")
        said = self._said = asyncio.Queue()
        self._doing = f"{command.do} {command.where if command.where is not None else 'of all groups'}"
        self._orders.put_nowait(command)
        while (item := await said.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def fetch(self) -> Command:
        """The next order."""
        return await self._orders.get()

    def say(self, text: str) -> None:
        if self._said is not None:
            self._said.put_nowait(text)

    def end(self, code: str | None = None, text: str = "") -> None:
        """It is done; code: of what kept it from that."""
        if self._said is not None:
            self._said.put_nowait(None if code is None else from_code(code, text))
            self._said = None
