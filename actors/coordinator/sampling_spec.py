"""A request's parameters in the shards' words."""

from actors.messages import SamplingSpec
from actors.requests import Request
from actors.sampling_params import ShardParams


def sampling_spec(request: Request) -> SamplingSpec:
    """The same at every admission."""
    params = request.params
    return SamplingSpec(
        **{name: getattr(params, name) for name in ShardParams.__struct_fields__},
        bad_words=request.bad_words,
        # As in vLLM, also the ends that ignore_eos would ignore.
        end_token_ids=(*request.eos_token_ids, *params.stop_token_ids) if params.min_tokens else (),
        grammar_end_ids=request.eos_token_ids if params.structured_outputs is not None else (),
    )
