"""From a user's request to the sequences that answer it."""

import secrets

from msgspec.structs import replace

from actors.requests import Request
from kernels_integration.philox import choice_seed


def choices(request: Request) -> tuple[Request, ...]:
    """The n sequences of a new incarnation; sequence 0 is drawn as n = 1 would draw it.

    The prompt's log probabilities are those of all; the first one brings them.
    """
    incarnation = secrets.randbits(63)
    params = request.params
    first = replace(params, n=1) if params.n > 1 else params
    later = replace(first, prompt_logprobs=None)
    return tuple(
        replace(
            request,
            incarnation=incarnation,
            index=index,
            params=later if index else first,
            seed=choice_seed(request.seed, index),
        )
        for index in range(params.n)
    )
