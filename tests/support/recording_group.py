"""A group inside this process whose drafts a test can look at."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.coordinator.draft_policy import DraftPolicy
from actors.inline_group import InlineGroup
from actors.messages import RowKind, StepInput, StepOutput
from actors.requests import Request
from kernels_integration.token_marks import MASKED
from tests.support.groups import Collected


@dataclass(frozen=True, kw_only=True)
class Verify:
    """The drafts of one step, how many of them held, and the position of the anchor that they follow."""

    anchor: int
    drafts: list[int]
    num_held: int

    @classmethod
    def of(cls, output: StepOutput) -> "Verify":
        """Of a step of one request."""
        drafts, tokens = output.drafts.tolist(), output.tokens.tolist()
        drawn = [token for token in tokens if token != MASKED]
        following = zip(drafts, drawn, drawn[1:], strict=False)  # a draft holds if a token follows it
        num_held = len(list(itertools.takewhile(lambda row: row[0] == row[1], following)))
        return cls(anchor=int(output.length[0]) - num_held - 1, drafts=drafts, num_held=num_held)


def run_in_turn(
    config: GroupConfig, requests: Sequence[Request], *, draft_policy: DraftPolicy | None = None
) -> list[tuple[Collected, list[Verify]]]:
    """Run requests one after another in one group; the updates of each, and every verify with its drafts."""
    group = InlineGroup(config)
    if draft_policy is not None:
        group._coordinator = Coordinator(config, tokenizer=None, draft_policy=draft_policy)
    send, next_report = group._shards.send, group._shards.next_report
    kinds: list[int] = []
    verifies: list[Verify] = []

    def recording_send(step: StepInput) -> None:
        kinds.append(int(step.kind[0]))
        send(step)

    def recording_report() -> StepOutput:
        output = next_report()
        if kinds.pop(0) == RowKind.VERIFY:
            verifies.append(Verify.of(output))
        return output

    group._shards.send = recording_send  # type: ignore[method-assign]
    group._shards.next_report = recording_report  # type: ignore[method-assign]
    results = []
    try:
        for request in requests:
            collected = Collected()
            group.submit(request)
            while group.has_work:
                for update in group.step():
                    collected.add(update)
            results.append((collected, verifies.copy()))
            verifies.clear()
    finally:
        group.close()
    return results
