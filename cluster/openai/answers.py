"""Outputs as OpenAI response bodies."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from actors.sampling_params import ALL_LOGPROBS
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.bodies import TextBody
from cluster.openai.chat_body import ChatBody
from cluster.openai.chat_message import finish_reason, whole_message
from cluster.openai.completions_body import CompletionsBody
from cluster.openai.echo import echoed_prompt, joined, without_tokens
from cluster.openai.usage import usage_of
from cluster.outputs import CompletionOutput, Logprob, OutputBuilder, RequestOutput
from cluster.tokenizer.token_bytes import TokenBytes


def answer_body(body: TextBody, outputs: Sequence[OutputBuilder], frontend: ModelFrontend) -> dict[str, Any]:
    """The answer to a body whose requests have finished, in the shape of its endpoint."""
    is_chat = isinstance(body, ChatBody)
    results = [builder.output() for builder in outputs]
    answer = answer_head(body, results[0].request_id, model=frontend.served_model_name)
    choices: list[dict[str, Any]] = []
    for position, (builder, result) in enumerate(zip(outputs, results, strict=True)):
        first = len(choices)
        for completion in result.outputs:
            shown = completion
            if isinstance(body, CompletionsBody) and body.echo:
                shown = without_tokens(shown) if body.wants_prompt_alone else shown
                prompt = echoed_prompt(body, position, builder, frontend)
                shown = shown if prompt is None else joined(prompt, shown)
            index = first + completion.index
            choices.append(_choice(body, index, shown, frontend, prompt_token_ids=result.prompt_token_ids))
        if result.prompt_logprobs is not None and "prompt_logprobs" in body.given_parameters:
            # where vLLM puts it
            (answer if is_chat else choices[first])["prompt_logprobs"] = [
                None if alternatives is None else {str(t): asdict(entry) for t, entry in alternatives.items()}
                for alternatives in result.prompt_logprobs
            ]
    return answer | {"choices": choices, "usage": answer_usage(body, results, frontend)}


def answer_usage(body: TextBody, results: Sequence[RequestOutput], frontend: ModelFrontend) -> dict[str, Any]:
    """What a prompt that stands alone has cost does not include the token that was not shown."""
    alone = isinstance(body, CompletionsBody) and body.wants_prompt_alone
    return usage_of(results, frontend, counts_completions=not alone)


def answer_head(body: TextBody, request_id: str, *, model: str) -> dict[str, Any]:
    """What an answer begins with, and each of its chunks."""
    is_chat = isinstance(body, ChatBody)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def choice_logprobs(
    body: TextBody,
    completion: CompletionOutput,
    token_bytes: TokenBytes,
    offsets: Sequence[int] | None = None,
) -> dict[str, Any] | None:
    """Those of a choice, or of a part of it; None when not asked for. offsets: of a part's tokens."""
    if isinstance(body, ChatBody):
        return _chat_logprobs(completion, body.top_logprobs or 0, token_bytes)
    if offsets is None:
        offsets = token_bytes.offsets(
            completion.token_ids, completion.text, skip_special_tokens=body.skips_special_tokens
        )
    return _completions_logprobs(completion, token_bytes, offsets)


def _choice(
    body: TextBody,
    index: int,
    completion: CompletionOutput,
    frontend: ModelFrontend,
    *,
    prompt_token_ids: Sequence[int],
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    reason: str | None = completion.finish_reason
    if isinstance(body, ChatBody):
        message = whole_message(body.reader(frontend, prompt_token_ids), completion.text)
        choice["message"] = message
        reason = finish_reason(reason, has_calls="tool_calls" in message)
    else:
        choice["text"] = completion.text
    choice["logprobs"] = choice_logprobs(body, completion, frontend.tokenizer.token_bytes)
    choice["finish_reason"] = reason
    choice["stop_reason"] = completion.stop_reason
    return choice


def _chat_logprobs(
    completion: CompletionOutput, num_top: int, token_bytes: TokenBytes
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def entry(token_id: int, found: Logprob) -> dict[str, Any]:
        data = token_bytes.of(token_id)
        text = token_bytes.text(token_id)
        return {
            "token": _escaped(data) if text is None else text,
            "logprob": found.logprob,
            "bytes": list(data),
        }

    content = []
    for token_id, alternatives in zip(completion.token_ids, completion.logprobs, strict=True):
        if num_top == ALL_LOGPROBS:
            num_top = len(alternatives)
        ranked = [(other, at) for other, at in alternatives.items() if at.rank and at.rank <= num_top]
        ranked.sort(key=lambda pair: pair[1].rank or 0)
        best = [entry(other, at) for other, at in ranked]
        content.append(entry(token_id, alternatives[token_id]) | {"top_logprobs": best})
    return {"content": content}


def _completions_logprobs(
    completion: CompletionOutput, token_bytes: TokenBytes, offsets: Sequence[int]
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    each = list(zip(completion.token_ids, completion.logprobs, strict=True))
    ids = completion.token_ids
    return {
        "tokens": [_token_text(token_id, token_bytes) for token_id in ids],
        # of a prompt's first token there are none
        "token_logprobs": [at[token_id].logprob if at else None for token_id, at in each],
        "text_offset": list(offsets),
        "top_logprobs": [_by_text(at, token_bytes) if at else None for at in completion.logprobs],
    }


def _by_text(alternatives: Mapping[int, Logprob], token_bytes: TokenBytes) -> dict[str, float]:
    """Log probabilities by the tokens' texts; of tokens that share one, the first has it, and the others are
    token_id:ID, as vLLM writes tokens that it shows by their ids."""
    found: dict[str, float] = {}
    for token_id, entry in alternatives.items():
        text = _token_text(token_id, token_bytes)
        found[f"token_id:{token_id}" if text in found else text] = entry.logprob
    return found


def _token_text(token_id: int, token_bytes: TokenBytes) -> str:
    """The token's text; where it is part of a character bytes:\\xe4\\xb8, as OpenAI's completions have it."""
    text = token_bytes.text(token_id)
    return f"bytes:{_escaped(token_bytes.of(token_id))}" if text is None else text


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
