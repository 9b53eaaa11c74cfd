"""Outputs as OpenAI response bodies."""

import itertools
import time
from dataclasses import asdict
from typing import Any

from actors.sampling_params import ALL_LOGPROBS
from cluster.errors import outcome
from cluster.openai.bodies import ChatBody, CompletionsBody
from cluster.outputs import CompletionOutput, Logprob, RequestOutput
from kernels_integration.errors import LatentrayError


def answer_body(body: ChatBody | CompletionsBody, output: RequestOutput, *, model: str) -> dict[str, Any]:
    """The answer to a finished request, in the shape of its endpoint."""
    is_chat = isinstance(body, ChatBody)
    num_prompt = len(output.prompt_token_ids)
    num_completion = sum(len(completion.token_ids) for completion in output.outputs)
    answer: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(body, completion) for completion in output.outputs],
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


def _choice(body: ChatBody | CompletionsBody, completion: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": completion.index}
    if isinstance(body, ChatBody):
        choice["message"] = {"role": "assistant", "content": completion.text}
        choice["logprobs"] = _chat_logprobs(completion, body.top_logprobs or 0)
    else:
        choice["text"] = completion.text
        choice["logprobs"] = _completions_logprobs(completion)
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


def _chat_logprobs(completion: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    content = []
    for token_id, alternatives in zip(completion.token_ids, completion.logprobs, strict=True):
        if num_top == ALL_LOGPROBS:
            num_top = len(alternatives)
        best = [entry for entry in alternatives.values() if entry.rank is not None and entry.rank <= num_top]
        best.sort(key=lambda entry: entry.rank or 0)
        content.append(
            _chat_entry(alternatives[token_id]) | {"top_logprobs": [_chat_entry(entry) for entry in best]}
        )
    return {"content": content}


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}


def _completions_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    chosen = [
        alternatives[token_id]
        for token_id, alternatives in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    tokens = [entry.decoded_token or "" for entry in chosen]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in chosen],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
        "top_logprobs": [
            {entry.decoded_token or "": entry.logprob for entry in alternatives.values()}
            for alternatives in completion.logprobs
        ],
    }
