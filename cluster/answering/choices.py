"""n > 1: one request for each completion of a prompt."""

from msgspec.structs import replace

from actors.requests import Request
from kernels_integration.philox import choice_seed


def choices(request: Request) -> tuple[Request, ...]:
    """The requests that together answer `request`; choice 0 is drawn as n = 1 would draw it.

    Ids follow vLLM: "<choice>_<id>"; a request with n = 1 stays as it is. The prompt's log probabilities are
    those of all choices; the first one brings them.
    """
    params = request.params
    if params.n == 1:
        return (request,)
    first = replace(params, n=1)
    later = replace(params, n=1, prompt_logprobs=None)
    return tuple(
        replace(
            request,
            request_id=f"{choice}_{request.request_id}",
            params=later if choice else first,
            seed=choice_seed(request.seed, choice),
        )
        for choice in range(params.n)
    )
