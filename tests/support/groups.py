"""Groups of the bundled checkpoint for tests, and drivers that run requests through them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import cluster
from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.sampling_params import SamplingParams

TINY_DSA = Path(cluster.__file__).parent / "assets" / "tiny-dsa"
EOS = 1


def group_config(**overrides: Any) -> GroupConfig:
    """A small float64 group of the bundled checkpoint; tests say what matters to them."""
    values: dict[str, Any] = {
        "model_path": str(TINY_DSA),
        "served_model_name": "tiny-dsa",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "num_kv_blocks": 512,
        "dtype": "float64",
        "kv_cache_dtype": "float64",
    }
    values.update(overrides)
    return GroupConfig(**values)


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_DSA / "tokenizer.json"))


def text_prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Prompts of exactly these lengths: <bos> and the beginning of one held-out passage each."""
    passages = json.loads((TINY_DSA / "heldout_prompts.json").read_text())["text"]
    tokenizer = load_tokenizer()
    prompts: list[tuple[int, ...]] = []
    for i, length in enumerate(lengths):
        ids = [0]
        following = i * 7
        while len(ids) < length:
            text = passages[following % len(passages)][1]
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            following += 1
        prompts.append(tuple(ids[:length]))
    return prompts


def request(request_id: str, prompt: Iterable[int], *, seed: int = 0, **params: Any) -> Request:
    """A request; greedy unless a temperature is given, and without an end-of-text token by default."""
    params.setdefault("temperature", 0.0)
    params.setdefault("ignore_eos", True)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=(EOS,),
    )


class Collected:
    """What a request's updates add up to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.updates: list[RequestUpdate] = []
        self.failed: RequestFailed | None = None

    def add(self, update: RequestUpdate | RequestFailed) -> None:
        if isinstance(update, RequestFailed):
            self.failed = update
            return
        self.updates.append(update)
        self.token_ids += update.token_ids

    @property
    def last(self) -> RequestUpdate:
        return self.updates[-1]


def run(group: InlineGroup, requests: Sequence[Request], *, together: bool = True) -> dict[str, Collected]:
    """Run requests to their end, all at once or one after another."""
    collected = {r.request_id: Collected() for r in requests}
    for batch in [requests] if together else [[r] for r in requests]:
        for r in batch:
            group.submit(r)
        while group.has_work:
            for update in group.step():
                collected[update.request_id].add(update)
    return collected
