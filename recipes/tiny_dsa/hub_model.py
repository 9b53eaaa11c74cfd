"""The checkpoint through transformers: questions and greedy answers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.tiny_dsa.vocabulary import EOS, PAD


class HubModel:
    """Model and tokenizer of a checkpoint folder."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.path = path
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def question_ids(self, question: str, *, system: str | None = None) -> list[int]:
        """The chat template over one question, up to where the answer begins."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0
    ) -> list[int]:
        """New tokens, greedy at temperature 0."""
        ids = torch.tensor([list(prompt)])
        sampling = {"temperature": temperature, "top_p": top_p} if temperature > 0 else {}
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=temperature > 0,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **sampling,
        )
        return out[0, len(prompt) :].tolist()

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def answer(self, question: str, max_tokens: int, *, system: str | None = None) -> str:
        """Greedy answer to a question."""
        return self.text(self.generate(self.question_ids(question, system=system), max_tokens))
