"""What the coordinator knows of a live request."""

import sys

from tokenizers import Tokenizer

from actors.coordinator.logprobs import PromptLogprobs
from actors.coordinator.stopping import StopConditions
from actors.requests import Progress, Request

NOT_ADMITTED = 0
"""No admission has this number."""
NEVER = sys.maxsize
"""More tokens than any request holds."""


class RequestState:
    """One live request: committed tokens, and where it stands on the shards.

    The scheduler writes `admission` and `slot`, the prefix cache `block_hashes`, `num_published_tokens` and
    `publish_at`, the coordinator the rest.
    """

    __slots__ = (
        "admission",
        "block_hashes",
        "limit",
        "num_accepted",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_draft_tokens",
        "num_hit_tokens",
        "num_logprobs",
        "num_pending",
        "num_prompt_tokens",
        "num_published_tokens",
        "num_reserved_tokens",
        "num_resumed_tokens",
        "prompt_logprobs",
        "publish_at",
        "request",
        "slot",
        "stop",
        "tokens",
        "turn",
        "waits_for_reports",
    )

    def __init__(
        self, request: Request, *, turn: tuple[int, int], limit: int, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.turn = turn
        """(priority, arrival), unique. Scheduling order: lower is served first."""
        self.limit = limit
        """min(max_model_len, prompt + max_tokens)."""
        self.tokens: list[int] = list(request.prompt_token_ids)
        """Committed: prompt and completion."""
        self.num_prompt_tokens = len(self.tokens)
        self.stop = StopConditions(request, limit=limit, tokenizer=tokenizer)
        self.waits_for_reports = request.params.structured_outputs is not None
        """One token step in flight: the next is not chosen before the last has reported."""
        progress = request.progress or Progress(token_ids=())
        self.num_resumed_tokens = len(progress.token_ids)
        """Of the completion, committed before it came here."""
        self.stop.cut(self.num_prompt_tokens, progress.token_ids)
        self.tokens += progress.token_ids
        self.num_logprobs = request.params.logprobs
        num_top = request.params.prompt_logprobs
        self.prompt_logprobs = None if num_top is None else PromptLogprobs(request.prompt_token_ids, num_top)
        self.num_draft_tokens = progress.num_draft_tokens
        self.num_accepted_tokens = progress.num_accepted_tokens
        self.block_hashes: list[bytes] = []
        """Of the full blocks of `tokens`, as far as anybody asked."""
        self.num_cached_tokens = None if request.progress is None else progress.num_cached_tokens
        """Prompt tokens that the first admission did not have to compute; None before it."""
        self.admission = NOT_ADMITTED
        self.slot = -1
        self.num_hit_tokens = 0
        """Tokens whose KV this admission found in the prefix cache."""
        self.num_computed = 0
        """Rows of chunks that have reported under this admission, or were found in the prefix cache."""
        self.num_reserved_tokens = 0
        """Tokens that the block table covers."""
        self.num_accepted = 0
        """Tokens accepted in this admission's last token step. 0 until its final chunk has reported: from
        then on all committed tokens but the anchor are computed, and the next rows are a verify."""
        self.num_pending = 0
        """Accepted tokens whose MTP entry is not computed yet."""
        self.num_published_tokens = 0
        """Tokens in the published blocks at the table's beginning: rows before them must not write."""
        self.publish_at = NEVER
        """Computed tokens at which the next block is full."""

    def admit(self, admission: int, slot: int, *, num_hit_tokens: int, num_repeated: int) -> None:
        """After a hit of n tokens the first row is n - 1: its hidden state is needed, its KV is there.

        num_repeated: how many such rows, one for each MTP module.
        """
        self.admission, self.slot = admission, slot
        self.num_hit_tokens = num_hit_tokens
        self.num_computed = max(num_hit_tokens - num_repeated, 0)
        self.num_accepted = self.num_pending = 0
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(num_hit_tokens, len(self.tokens) - 1)

    def withdraw(self) -> None:
        """The state slot is gone; results under the old admission number no longer count."""
        self.admission, self.slot = NOT_ADMITTED, -1
        self.num_accepted = 0
        self.publish_at = NEVER

    def commit(self, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append a token step's tokens up to the first stop; the tokens kept (contracts/mtp.md 5)."""
        kept = emitted[: self.stop.cut(len(self.tokens), emitted)]
        self.tokens += kept
        self.num_accepted = len(kept)
        assert len(self.tokens) <= self.limit
        return kept
