"""How long a request may become, and which ones could never run."""

from itertools import chain

from actors.config import GroupConfig
from actors.coordinator.blocks import BlockManager
from actors.requests import Request
from kernels_integration.errors import ContextLengthError, InvalidRequestError, shown


def require_prompt_fits(num_tokens: int, max_model_len: int) -> None:
    """Of front ends, which users hear, and of the coordinator behind them. Errors: ContextLengthError."""
    if not 0 < num_tokens < max_model_len:
        raise ContextLengthError(
            f"prompt has {num_tokens} tokens; it must have at least one, and max_model_len {max_model_len} "
            f"leaves room for {max_model_len - 1} and one new token: "
            + ("shorten the prompt or raise --max-model-len" if num_tokens else "write one"),
            field="prompt",
        )


def checked_limit(request: Request, config: GroupConfig, blocks: BlockManager, *, has_tokenizer: bool) -> int:
    """Tokens of prompt and completion, at most.

    Errors: InvalidRequestError for a request that could never run.
    """
    prompt_len, params = len(request.prompt_token_ids), request.params
    max_model_len = config.max_model_len
    require_prompt_fits(prompt_len, max_model_len)
    if (token_id := _largest_token_id(request)) >= config.vocab_size:
        raise InvalidRequestError(
            f"the request holds token id {token_id}; token ids are below {config.vocab_size}",
            field="prompt_token_ids",
        )
    if params.stop and not has_tokenizer:
        raise InvalidRequestError(
            f"stop is {shown(params.stop)}; stop strings need a tokenizer, which this group does not have; "
            "use stop_token_ids, or start the group with a tokenizer",
            field="stop",
        )
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, prompt_len + params.max_tokens)
    if request.progress is not None and prompt_len + len(request.progress.token_ids) >= limit:
        raise InvalidRequestError(
            f"the request goes on from {len(request.progress.token_ids)} tokens behind {prompt_len} of its "
            f"prompt; {limit} tokens are its limit",
            field="progress",
        )
    num_blocks = blocks.blocks_for(limit - 1)
    if num_blocks > blocks.num_blocks:
        tokens = blocks.num_blocks * blocks.tokens_per_block + 1
        raise InvalidRequestError(
            f"{prompt_len} prompt tokens and max_tokens {params.max_tokens} need {num_blocks} KV blocks; "
            f"the group has {blocks.num_blocks}, for {tokens} tokens of prompt and completion; "
            "lower max_tokens, shorten the prompt, or serve with more num-kv-blocks",
            field="max_tokens",
        )
    return limit


def _largest_token_id(request: Request) -> int:
    """Of all that the shards would look up. Front ends check them too, and say which field is wrong."""
    params = request.params
    ends = (*request.eos_token_ids, *params.stop_token_ids) if params.min_tokens else ()
    lists = (request.prompt_token_ids, ends, *request.bad_words, params.allowed_token_ids or ())
    resumed = request.progress.token_ids if request.progress is not None else ()
    return max(chain(*lists, resumed, params.logit_bias or ()))
