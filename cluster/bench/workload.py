"""The requests that both sides of a comparison answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from actors.requests import Request
from actors.sampling_params import SamplingParams
from cluster.config.args import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of `input_len` real-text tokens; completions of exactly `output_len` tokens, greedy."""

    prompts: tuple[tuple[int, ...], ...]
    output_len: int

    def requests(self, batch_size: int, prefix: str) -> list[Request]:
        """The first `batch_size` prompts as requests that no end-of-text token ends early."""
        params = SamplingParams(temperature=0.0, max_tokens=self.output_len, ignore_eos=True)
        return [
            Request(
                request_id=f"{prefix}-{i}",
                prompt_token_ids=prompt,
                params=params,
                seed=i,
                eos_token_ids=(),
            )
            for i, prompt in enumerate(self.prompts[:batch_size])
        ]


def text_workload(
    frontend: ModelFrontend, *, num_prompts: int, input_len: int, output_len: int, max_model_len: int
) -> Workload:
    """Held-out passages of the bundled checkpoint, in the served model's own tokens.

    Errors: ConfigError when prompt and completion do not fit the context.
    """
    if input_len < 1 or output_len < 2 or input_len + output_len > max_model_len:
        raise ConfigError(
            f"input-len {input_len} and output-len {output_len} must be at least 1 and 2 and fit "
            f"max-model-len {max_model_len} together; lower one of them"
        )
    passages: Sequence[Sequence[str]] = json.loads((BUNDLED_CHECKPOINT / "heldout_prompts.json").read_text())[
        "text"
    ]
    ids = [frontend.tokenizer.encode(text) for _, text in passages]
    prompts = []
    for i in range(num_prompts):
        prompt: list[int] = []
        following = i
        while len(prompt) < input_len:
            prompt += ids[following % len(ids)]
            following += num_prompts
        prompts.append(tuple(prompt[:input_len]))
    return Workload(prompts=tuple(prompts), output_len=output_len)
