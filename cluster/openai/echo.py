"""The prompt as the beginning of a completion: `echo` of /v1/completions."""

from dataclasses import replace

from cluster.frontend.front_end import ModelFrontend
from cluster.openai.completions_body import CompletionsBody
from cluster.outputs import CompletionOutput, Logprob, OutputBuilder


def echoed_prompt(
    body: CompletionsBody, position: int, builder: OutputBuilder, frontend: ModelFrontend
) -> CompletionOutput | None:
    """The prompt at this position of the body as a part of its completions; None while its log probabilities
    are awaited. The first token's are empty."""
    request = builder.request
    token_ids = list(request.prompt_token_ids)
    prompt = body.prompts()[position]
    if not isinstance(prompt, str):
        prompt = frontend.tokenizer.decode(token_ids, skip_special_tokens=request.params.skip_special_tokens)
    logprobs = None
    if body.logprobs is not None:
        known = builder.prompt_logprobs() or []
        if len(known) < len(token_ids):
            return None
        logprobs = [entry or {} for entry in known]
    return CompletionOutput(index=0, text=prompt, token_ids=token_ids, logprobs=logprobs, seed=request.seed)


def joined(prompt: CompletionOutput, completion: CompletionOutput) -> CompletionOutput:
    """Both as one completion."""
    wanted = prompt.logprobs is not None and completion.logprobs is not None
    return replace(
        completion,
        text=prompt.text + completion.text,
        token_ids=prompt.token_ids + completion.token_ids,
        logprobs=prompt.logprobs + completion.logprobs if wanted else None,  # type: ignore[operator]
    )


def without_tokens(completion: CompletionOutput) -> CompletionOutput:
    """Of a body that asks for its prompt alone: what was drawn all the same is not shown."""
    logprobs: list[dict[int, Logprob]] | None = None if completion.logprobs is None else []
    reason = completion.finish_reason and "length"
    return replace(
        completion, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None
    )
