"""A group inside this process whose drafts a test can look at."""

from dataclasses import dataclass

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.messages import RowKind, StepInput
from actors.requests import Request
from tests.support.groups import Collected


@dataclass(frozen=True, kw_only=True)
class Verify:
    """The drafts of one step, and the position of the anchor that they follow."""

    anchor: int
    drafts: list[int]


def run_alone(config: GroupConfig, request: Request) -> tuple[Collected, list[Verify]]:
    """Run one request to its end; its updates, and every verify with its drafts."""
    group = InlineGroup(config)
    execute, verifies = group._shards.execute, list[Verify]()

    def recording(step: StepInput):
        output = execute(step)
        if step.kind[0] == RowKind.VERIFY:
            verifies.append(Verify(anchor=int(step.start[0]), drafts=output.drafts.tolist()))
        return output

    group._shards.execute = recording  # type: ignore[method-assign]
    collected = Collected()
    try:
        group.submit(request)
        while group.has_work:
            for update in group.step():
                collected.add(update)
    finally:
        group.close()
    return collected, verifies
