"""Outputs as OpenAI response bodies."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from actors.sampling_params import ALL_LOGPROBS
from cluster.errors import outcome
from cluster.openai.bodies import ChatBody, CompletionsBody
from cluster.outputs import CompletionOutput, Logprob, RequestOutput
from cluster.tokenizer.token_bytes import TokenBytes
from kernels_integration.errors import LatentrayError


def answer_body(
    body: ChatBody | CompletionsBody, output: RequestOutput, *, model: str, token_bytes: TokenBytes
) -> dict[str, Any]:
    """The answer to a finished request, in the shape of its endpoint. token_bytes: of the model's tokens."""
    is_chat = isinstance(body, ChatBody)
    num_prompt = len(output.prompt_token_ids)
    num_completion = sum(len(completion.token_ids) for completion in output.outputs)
    answer: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(body, completion, token_bytes) for completion in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
    }
    if output.prompt_logprobs is not None:  # where vLLM puts it
        (answer if is_chat else answer["choices"][0])["prompt_logprobs"] = [
            None if alternatives is None else {str(t): asdict(entry) for t, entry in alternatives.items()}
            for alternatives in output.prompt_logprobs
        ]
    return answer


def _choice(
    body: ChatBody | CompletionsBody, completion: CompletionOutput, token_bytes: TokenBytes
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": completion.index}
    if isinstance(body, ChatBody):
        choice["message"] = {"role": "assistant", "content": completion.text}
        choice["logprobs"] = _chat_logprobs(completion, body.top_logprobs or 0, token_bytes)
    else:
        choice["text"] = completion.text
        skips = (body.model_extra or {}).get("skip_special_tokens") is not False
        choice["logprobs"] = _completions_logprobs(completion, token_bytes, skip_special_tokens=skips)
    choice["finish_reason"] = completion.finish_reason
    choice["stop_reason"] = completion.stop_reason
    return choice


def error_body(error: LatentrayError) -> dict[str, Any]:
    """The body of a failed request."""
    status = outcome(error).http_status
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": getattr(error, "field", None),
            "code": error.code,
        }
    }


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
    completion: CompletionOutput, token_bytes: TokenBytes, *, skip_special_tokens: bool
) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    each = list(zip(completion.token_ids, completion.logprobs, strict=True))
    ids = completion.token_ids
    return {
        "tokens": [_token_text(token_id, token_bytes) for token_id in ids],
        "token_logprobs": [alternatives[token_id].logprob for token_id, alternatives in each],
        "text_offset": token_bytes.offsets(ids, completion.text, skip_special_tokens=skip_special_tokens),
        "top_logprobs": [_by_text(alternatives, token_bytes) for alternatives in completion.logprobs],
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
