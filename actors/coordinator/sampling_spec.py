"""A request's parameters in the shards' words."""

from actors.messages import SamplingSpec
from actors.requests import Request


def sampling_spec(request: Request) -> SamplingSpec:
    """The same at every admission."""
    params = request.params
    return SamplingSpec(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=params.allowed_token_ids or (),
        bad_words=request.bad_words,
        min_tokens=params.min_tokens,
        # As in vLLM, also the ends that ignore_eos would ignore.
        end_token_ids=(*request.eos_token_ids, *params.stop_token_ids) if params.min_tokens else (),
    )
