"""What the coordinator knows of a live request."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.coordinator.logprobs import PromptLogprobs
from actors.coordinator.stopping import StopConditions
from actors.requests import FinishReason, Request

NOT_ADMITTED = 0
"""No admission has this number."""


class RequestState:
    """One live request: committed tokens, and where it stands on the shards.

    The scheduler writes `admission`, `slot` and `num_computed`; `commit` writes the rest.
    """

    __slots__ = (
        "admission",
        "arrival",
        "limit",
        "num_accepted",
        "num_accepted_tokens",
        "num_computed",
        "num_draft_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request",
        "slot",
        "stop",
        "tokens",
    )

    def __init__(self, request: Request, *, arrival: int, limit: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.arrival = arrival
        """Scheduling order: lower is served first."""
        self.limit = limit
        """min(max_model_len, prompt + max_tokens)."""
        self.tokens: list[int] = list(request.prompt_token_ids)
        """Committed: prompt and completion."""
        self.num_prompt_tokens = len(self.tokens)
        self.stop = StopConditions(request, limit=limit, tokenizer=tokenizer)
        num_top = request.params.prompt_logprobs
        self.prompt_logprobs = None if num_top is None else PromptLogprobs(request.prompt_token_ids, num_top)
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.admission = NOT_ADMITTED
        self.slot = -1
        self.num_computed = 0
        """Rows of chunks that have reported under this admission."""
        self.num_accepted = 0
        """Tokens accepted in this admission's last token step; 0 until its final chunk has reported."""

    @property
    def decoding(self) -> bool:
        """All committed tokens but the anchor are computed: the next rows are a verify."""
        return self.num_accepted > 0

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.stop.finish_reason

    def admit(self, admission: int, slot: int) -> None:
        self.admission, self.slot = admission, slot
        self.num_computed = self.num_accepted = 0

    def withdraw(self) -> None:
        """The state slot is gone; results under the old admission number no longer count."""
        self.admission, self.slot = NOT_ADMITTED, -1
        self.num_computed = self.num_accepted = 0

    def commit(self, emitted: Sequence[int]) -> list[int]:
        """Append a token step's tokens up to the first stop; the tokens kept (contracts/mtp.md 5)."""
        kept = list(emitted[: self.stop.cut(len(self.tokens), emitted)])
        self.tokens += kept
        self.num_accepted = len(kept)
        assert len(self.tokens) <= self.limit
        return kept
