"""What sampling parameters ask for, one row at a time in plain Python, in vLLM's words and order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.reference import filtered_probabilities

FILTERS = ("temperature", "top_k", "top_p", "min_p")


def edited_logits(
    logits: Tensor,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    end_token_ids: Sequence[int] = (),
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> Tensor:
    """[V] of one row that draws the token after prompt and completion; bad_words as token sequences."""
    row = logits.tolist()
    if allowed_token_ids is not None:
        row = [value if token in set(allowed_token_ids) else float("-inf") for token, value in enumerate(row)]
    for word in bad_words:
        *before, last = word
        if len(before) <= len(completion) and list(completion[len(completion) - len(before) :]) == before:
            row[last] = float("-inf")
    if len(completion) < min_tokens:
        for token in end_token_ids:
            row[token] = float("-inf")
    for token, bias in (logit_bias or {}).items():
        row[token] += bias
    for token in {*prompt, *completion}:
        row[token] = row[token] / repetition_penalty if row[token] > 0 else row[token] * repetition_penalty
    for token in completion:
        row[token] -= frequency_penalty
    for token in set(completion):
        row[token] -= presence_penalty
    return torch.tensor(row, dtype=logits.dtype)


def probabilities(logits: Tensor, prompt: Sequence[int], completion: Sequence[int], **params) -> Tensor:
    """[V] float64: the distribution of the token after prompt and completion."""
    rules = {name: value for name, value in params.items() if name not in FILTERS}
    filters = {name: value for name, value in params.items() if name in FILTERS}
    edited = edited_logits(logits.double(), prompt, completion, **rules)
    return filtered_probabilities(edited.unsqueeze(0), **{"temperature": 1.0} | filters)[0]
