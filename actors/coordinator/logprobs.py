"""The log probabilities of a report, as values per token."""

from collections.abc import Sequence

from actors.messages import TokenLogprobs
from actors.requests import TokenLogprob


class LogprobRows:
    """One report's rows; requests claim theirs in the report's order."""

    __slots__ = ("_ids", "_num_claimed", "_num_top", "_sampled", "_values")

    def __init__(self, logprobs: TokenLogprobs | None) -> None:
        self._num_top = logprobs.num_top if logprobs is not None else 0
        self._sampled: list[float] = logprobs.sampled.tolist() if logprobs is not None else []
        self._ids: list[int] = logprobs.top_ids.tolist() if logprobs is not None else []
        self._values: list[float] = logprobs.top_values.tolist() if logprobs is not None else []
        self._num_claimed = 0

    def claim(self, num_rows: int) -> int:
        """The first of the next num_rows rows. They are claimed also for a request that has ended since."""
        first_row = self._num_claimed
        self._num_claimed += num_rows
        return first_row

    def of(self, token_ids: Sequence[int], first_row: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """For the tokens of rows first_row.., each with its `num_top` best alternatives."""
        found = []
        for row, token_id in enumerate(token_ids, first_row):
            start = row * self._num_top
            top = tuple(
                zip(self._ids[start : start + num_top], self._values[start : start + num_top], strict=True)
            )
            found.append(TokenLogprob(token_id=token_id, logprob=self._sampled[row], top=top))
        return tuple(found)


class PromptLogprobs:
    """One request's prompt log probabilities, chunk by chunk. The first token has none.

    A preempted request computes its chunks again; what is known stays as it was.
    """

    __slots__ = ("_known", "_num_top", "_prompt", "_taken")

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        self._prompt = prompt
        self._num_top = num_top
        self._known: list[TokenLogprob] = []
        self._taken = False

    def num_rows(self, start: int, num_rows: int) -> int:
        """How many of the chunk rows at positions start.. predict a token of the prompt."""
        return max(0, min(start + num_rows, len(self._prompt) - 1) - start)

    def add(self, rows: LogprobRows, first_row: int, start: int, num_rows: int) -> None:
        """Chunk rows at positions start.. have reported, of which num_rows predict prompt tokens."""
        num_old = min(max(len(self._known) - start, 0), num_rows)
        new = self._prompt[start + num_old + 1 : start + num_rows + 1]
        self._known += rows.of(new, first_row + num_old, self._num_top)

    def take(self) -> tuple[TokenLogprob, ...]:
        """Of prompt tokens 1.., in order; () after the first call."""
        taken = () if self._taken else tuple(self._known)
        self._taken = True
        return taken
