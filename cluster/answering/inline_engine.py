"""The group inside this process: no Ray, no sockets, no event loop."""

from collections.abc import Iterable

import tokenizers

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from kernels_integration.spans import Span


class InlineEngine:
    """An Engine whose steps run while `updates` waits."""

    def __init__(self, config: GroupConfig, *, tokenizer: tokenizers.Tokenizer) -> None:
        self._group = InlineGroup(config, tokenizer=tokenizer)

    def submit(self, request: Request) -> None:
        self._group.submit(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._group.abort(list(request_ids))

    def updates(self) -> list[RequestUpdate | RequestFailed]:
        found = self._group.step()  # also delivers what `abort` or `submit` decided without a step
        while not found and self._group.has_work:
            found = self._group.step()
        return found

    def stats(self) -> GroupStats:
        return self._group.stats()

    def take_trace(self) -> dict[str, list[Span]]:
        return self._group.take_trace()

    def close(self) -> None:
        self._group.close()
