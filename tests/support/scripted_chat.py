"""A group that says what a test lets it say, as a model with its own way to think and to call tools would."""

import random

from actors.requests import Request
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from tests.support.scripted_group import Script, update


class Saying:
    """A script: each request gets the tokens of `text` and an end, in updates of random sizes."""

    def __init__(self, frontend: ModelFrontend, text: str = "", *, seed: int = 0) -> None:
        self.frontend = frontend
        self._rng = random.Random(seed)
        self.text = text
        self.prompts: list[str] = []
        """As the model saw them."""

    def __call__(self, request: Request) -> Script:
        tokenizer = self.frontend.tokenizer
        self.prompts.append(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
        whole = [*tokenizer.encode(self.text, add_special_tokens=False), self.frontend.eos_token_ids[0]]
        ids = whole[: request.params.max_tokens]
        steps, done = [], 0
        while done < len(ids):
            end = min(done + self._rng.randint(1, 5), len(ids))
            reason = None if end < len(ids) else "stop" if ids == whole else "length"
            steps.append(update(request, ids[done:end], done, finish_reason=reason))
            done = end
        return steps


def chat_frontend(template: str, **options: object) -> ModelFrontend:
    """The bundled checkpoint's tokenizer under another chat template (a file)."""
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT,
        served_model_name="tiny",
        max_model_len=4096,
        seed=0,
        chat_template=template,
        **options,  # type: ignore[arg-type]
    )
