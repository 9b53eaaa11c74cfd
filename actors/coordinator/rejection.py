"""Which drafts the target accepts: a pure function of what a step reports (contracts/mtp.md 4)."""

from collections.abc import Sequence

MASKED = -1
"""Token of a row at or beyond the request's limit."""


def accept(drafts: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens that a verify emits: 1..k+1 of `tokens`, always exactly the target's stream.

    drafts: d_1..d_k, what rows 1..k held. tokens: x_0..x_k, the target's own token of each row. x_0 is
    emitted; x_i follows while d_i equals x_{i-1}. A masked row emits nothing. A final chunk has k = 0.
    """
    emitted: list[int] = []
    for i, token in enumerate(tokens):
        if token == MASKED or (i > 0 and drafts[i - 1] != tokens[i - 1]):
            break
        emitted.append(token)
    return emitted


class AcceptanceCounters:
    """Proposed and accepted drafts by position, counted before a stop cuts the run."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_verifies = 0
        self.proposed = [0] * num_speculative_tokens
        self.accepted = [0] * num_speculative_tokens

    def add(self, num_proposed: int, num_accepted: int) -> None:
        self.num_verifies += 1
        for i in range(num_proposed):
            self.proposed[i] += 1
        for i in range(num_accepted):
            self.accepted[i] += 1
