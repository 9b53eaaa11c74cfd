"""What an answer has cost, in tokens."""

from collections.abc import Sequence
from typing import Any

from cluster.chat.reasoning import END_OF_PROMPT, END_THINK, THINK, opens_thoughts
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import RequestOutput


def usage_of(
    results: Sequence[RequestOutput], frontend: ModelFrontend, *, counts_completions: bool = True
) -> dict[str, Any]:
    """Totals over the requests of a body."""
    completions = [(result, completion) for result in results for completion in result.outputs]
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_completion = sum(len(c.token_ids) for _, c in completions) if counts_completions else 0
    num_reasoning = sum(_num_reasoning(r.prompt_token_ids, c.token_ids, frontend) for r, c in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def _num_reasoning(prompt: Sequence[int], ids: Sequence[int], frontend: ModelFrontend) -> int:
    """Tokens up to the end of the thoughts; 0 where the tokenizer has no token for that."""
    if not frontend.answer_form.thinks:
        return 0
    tokenizer = frontend.tokenizer
    end = tokenizer.backend.token_to_id(END_THINK)
    if end is None:
        return 0
    opened = opens_thoughts(tokenizer.decode(prompt[-END_OF_PROMPT:], skip_special_tokens=False))
    begins = tokenizer.decode(ids[:4], skip_special_tokens=False).lstrip().startswith(THINK)
    if not opened and not begins:
        return 0
    return list(ids).index(end) + 1 if end in ids else len(ids)
