"""What a request's front end is told of tokens that were committed."""

from actors.coordinator.logprobs import LogprobRows
from actors.coordinator.request_state import RequestState
from actors.requests import RequestUpdate
from actors.stats import PhaseTimes


def update_of(
    state: RequestState,
    kept: tuple[int, ...],
    logprobs: LogprobRows,
    first_row: int,
    phases: PhaseTimes | None,
) -> RequestUpdate:
    """kept: the newest tokens; their log probabilities begin at first_row. phases: with the last."""
    request, stop, num_top = state.request, state.stop, state.num_logprobs
    return RequestUpdate(
        request_id=request.request_id,
        incarnation=request.incarnation,
        index=request.index,
        token_ids=kept,
        num_held=stop.num_held,
        logprobs=logprobs.of(kept, first_row, num_top) if num_top is not None else (),
        prompt_logprobs=state.prompt_logprobs.take() if state.prompt_logprobs else (),
        finish_reason=stop.finish_reason,
        matched_stop=stop.matched_stop,
        num_prompt_tokens=state.num_prompt_tokens,
        num_completion_tokens=len(state.tokens) - state.num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens or 0,
        num_draft_tokens=state.num_draft_tokens,
        num_accepted_tokens=state.num_accepted_tokens,
        phases=phases,
    )
