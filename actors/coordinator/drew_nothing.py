"""Why a request ends whose row of logits gave no token (contracts/mtp.md 4)."""

from actors.coordinator.request_state import RequestState
from actors.coordinator.sampling_spec import sampling_spec
from kernels_integration.errors import InvalidRequestError, LatentrayError


def drew_nothing(request: RequestState) -> tuple[str, str]:
    """Code and message of a request whose row of logits, as its rules left them, held nothing finite."""
    position = len(request.tokens) - request.num_prompt_tokens
    spec = sampling_spec(request.request)
    if spec.has_rules:
        late = ", or structured_outputs takes too much time" if spec.structured_outputs is not None else ""
        return InvalidRequestError.code, (
            f"no token can be drawn at position {position} of the completion: the request's rules "
            "(structured_outputs, allowed_token_ids, bad_words, logit_bias, penalties, min_tokens with its "
            f"end tokens) leave none{late}, or the model's logits there hold nothing finite; relax the rules"
        )
    return LatentrayError.code, (
        f"no token can be drawn at position {position} of the completion: the model's logits hold only NaN, "
        "+inf or -inf; check the checkpoint's weights for NaN, and against overflow use --dtype float32"
    )
