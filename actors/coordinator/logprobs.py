"""The log probabilities of a report, as values per emitted token."""

from actors.messages import TokenLogprobs
from actors.requests import TokenLogprob


class LogprobRows:
    """One report's rows, one per entry of StepOutput.tokens."""

    __slots__ = ("_ids", "_num_top", "_sampled", "_values")

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self._num_top = logprobs.num_top
        self._sampled: list[float] = logprobs.sampled.tolist()
        self._ids: list[int] = logprobs.top_ids.tolist()
        self._values: list[float] = logprobs.top_values.tolist()

    def of(self, token_ids: list[int], first_row: int, num_top: int) -> tuple[TokenLogprob, ...]:
        """For the tokens of rows first_row.., each with its `num_top` best alternatives."""
        found = []
        for row, token_id in enumerate(token_ids, first_row):
            start = row * self._num_top
            top = tuple(
                zip(self._ids[start : start + num_top], self._values[start : start + num_top], strict=True)
            )
            found.append(TokenLogprob(token_id=token_id, logprob=self._sampled[row], top=top))
        return tuple(found)
