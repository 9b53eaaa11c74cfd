"""Held-out loss, greedy samples and draft acceptance of the training model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.tiny_dsa.acceptance import acceptance_report
from recipes.tiny_dsa.losses import cross_entropy
from recipes.tiny_dsa.model import AttentionMode, TinyDsa
from recipes.tiny_dsa.vocabulary import EOS, PAD, question_ids, text_ids

# A window of S tokens is read with its S targets and those of three drafts.
MAX_MTP_STEPS = 3
EVALUATION_WINDOWS = (512, 1024, 2048)
EVALUATION_TOPKS = (32, 64, 128, 256)
PROMPT_TOKENS = 96
NUM_PROMPTS = 128

DEMO_TEXTS = (
    "The history of",
    "Once upon a time",
    "Python is a programming language that",
    "It is a truth universally acknowledged, that",
    "The function returns",
    "In the beginning",
)
DEMO_QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "What is a dog?",
    "Where is Japan?",
    "What does happy mean?",
    "What languages are spoken in Brazil?",
    "Who are you?",
    "Tell me about Egypt.",
    "What is the currency of India?",
    "What is a database?",
)


def windows(tokens: Tensor, window: int, batches: int, batch_size: int) -> Iterator[Tensor]:
    """Evenly spaced windows [B, S + 4] of a token stream, interleaved over the batches."""
    last_start = len(tokens) - window - 5
    if last_start < 0:
        raise ValueError(
            f"the held-out stream has {len(tokens)} tokens; windows of {window} need {window + 5} or more"
        )
    starts = np.linspace(0, last_start, batch_size * batches).astype(np.int64)
    for batch in range(batches):
        yield torch.stack([tokens[start : start + window + 4] for start in starts[batch::batches]]).long()


@torch.no_grad()
def evaluate(
    model: TinyDsa,
    tokens: Tensor,
    window: int,
    mode: AttentionMode,
    topk: int,
    *,
    batches: int = 4,
    batch_size: int = 32,
    steps: int = 1,
) -> tuple[float, list[float]]:
    """Mean loss (nats a token) of the main model, and of the MTP layer at each depth."""
    head = model.params["lm_head.weight"]
    loss, mtp_losses = 0.0, [0.0] * steps
    for ids in windows(tokens, window, batches, batch_size):
        (h,) = model.main(ids[:, :window], mode, topk).hidden
        loss += float(cross_entropy(h, head, ids[:, 1 : window + 1]))
        for j, out in enumerate(model.mtp(h, ids, steps, mode, topk).hidden, 1):
            mtp_losses[j - 1] += float(cross_entropy(out, head, ids[:, j + 1 : j + 1 + window]))
    return loss / batches, [mtp_loss / batches for mtp_loss in mtp_losses]


class Continuations(NamedTuple):
    """Right-padded sequences [B, ...], the length of each prompt and of each whole sequence."""

    tokens: Tensor
    prompt_lens: Tensor
    lens: Tensor

    def completion(self, row: int) -> list[int]:
        return self.tokens[row, int(self.prompt_lens[row]) : int(self.lens[row])].tolist()


@torch.no_grad()
def greedy(model: TinyDsa, prompts: Sequence[list[int]], max_tokens: int, topk: int) -> Continuations:
    """Greedy continuations without a cache."""
    device = model.device
    lens = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(lens.max()) + max_tokens + 1 + MAX_MTP_STEPS
    tokens = torch.full((len(prompts), width), PAD, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    prompt_lens, done = lens.clone(), torch.zeros_like(lens, dtype=torch.bool)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(max_tokens):
        (h,) = model.main(tokens[:, : int(lens.max())], "sparse_eval", topk).hidden
        next_tokens = model.logits(h[rows, lens - 1]).argmax(-1)
        next_tokens = torch.where(done, PAD, next_tokens)
        tokens[rows, lens] = next_tokens
        lens = lens + (~done).long()
        done |= next_tokens == EOS
        if bool(done.all()):
            break
    return Continuations(tokens, prompt_lens, lens)


@torch.no_grad()
def replay_acceptance(
    model: TinyDsa, continuations: Continuations, topk: int, k: int, *, chain_normed: bool = True
) -> dict[str, Any]:
    """Greedy speculative decoding with k drafts, replayed over finished greedy sequences."""
    tokens, prompt_lens, lens = continuations
    window = int(lens.max())
    (h,) = model.main(tokens[:, :window], "sparse_eval", topk).hidden
    outs = model.mtp(h, tokens, k, "sparse_eval", topk, chain_normed=chain_normed).hidden
    holds = [
        (model.logits(out).argmax(-1) == tokens[:, j + 1 : j + 1 + window]).cpu().numpy()
        for j, out in enumerate(outs, 1)
    ]
    counts = [0] * (k + 1)
    for row in range(tokens.shape[0]):
        # tokens[row, position] was just drawn from the state at position - 1
        position, end = int(prompt_lens[row]), int(lens[row])
        while position + k < end:
            accepted = 0
            while accepted < k and holds[accepted][row, position - 1]:
                accepted += 1
            counts[accepted] += 1
            position += accepted + 1
    return acceptance_report(counts)


@torch.no_grad()
def text_agreement(
    model: TinyDsa,
    tokens: Tensor,
    window: int,
    topk: int,
    *,
    k: int = MAX_MTP_STEPS,
    batches: int = 8,
    batch_size: int = 16,
) -> dict[str, list[float]]:
    """On real held-out text (no greedy loops): how often draft j and all before it equal the main model's
    greedy choice, and the mean overlap sum(min(p, q)), the acceptance probability when sampling at T = 1.
    """
    agreed, overlap = [0.0] * k, [0.0] * k
    kept = window - k
    for ids in windows(tokens, window, batches, batch_size):
        (h,) = model.main(ids[:, :window], "sparse_eval", topk).hidden
        logits = model.logits(h).float()
        outs = model.mtp(h, ids, k, "sparse_eval", topk).hidden
        probs, choices = torch.softmax(logits, -1), logits.argmax(-1)
        all_agree = torch.ones_like(choices[:, :kept], dtype=torch.bool)
        for j, out in enumerate(outs, 1):
            draft_logits = model.logits(out).float()[:, :kept]
            all_agree = all_agree & (draft_logits.argmax(-1) == choices[:, j : kept + j])
            agreed[j - 1] += float(all_agree.float().mean())
            draft_probs = torch.softmax(draft_logits, -1)
            overlap[j - 1] += float(torch.minimum(draft_probs, probs[:, j : kept + j]).sum(-1).mean())
    return {
        "greedy_accept_at_least": [round(value / batches, 4) for value in agreed],
        "sampling_overlap": [round(value / batches, 4) for value in overlap],
    }


def loss_table(model: TinyDsa, tokens: Tensor) -> dict[str, float | list[float]]:
    """Held-out loss by window, dense and by the number of chosen keys; MTP losses at the shipped number."""
    shipped = model.config.index_topk
    table: dict[str, float | list[float]] = {}
    for window in EVALUATION_WINDOWS:
        batch_size = 16384 // window
        table[f"{window}/dense"], _ = evaluate(model, tokens, window, "flash", shipped, batch_size=batch_size)
        for topk in EVALUATION_TOPKS:
            steps = MAX_MTP_STEPS if topk == shipped else 1
            loss, mtp_losses = evaluate(
                model, tokens, window, "sparse_eval", topk, batch_size=batch_size, steps=steps
            )
            table[f"{window}/top{topk}"] = loss
            if topk == shipped:
                table[f"{window}/top{topk}/mtp"] = mtp_losses
    return table


def evaluation_prompts(tokenizer: Tokenizer, path: Path) -> dict[str, tuple[list[list[int]], int]]:
    """Sets of prompts, each with the number of tokens to generate; `path` is data.py's val_prompts.json."""
    held_out = json.loads(path.read_text(encoding="utf-8"))
    texts = [text_ids(tokenizer, text)[: 1 + PROMPT_TOKENS] for _, text in held_out["text"]]
    texts = [prompt for prompt in texts if len(prompt) == 1 + PROMPT_TOKENS]
    questions = [question_ids(tokenizer, question) for question, _ in held_out["chat"]]
    return {
        "text": (texts[:NUM_PROMPTS], 128),
        "chat": (questions[:NUM_PROMPTS], 48),
        "demo": ([text_ids(tokenizer, text) for text in DEMO_TEXTS], 100),
        "demo_chat": ([question_ids(tokenizer, question) for question in DEMO_QUESTIONS], 60),
    }


def sample_and_replay(
    model: TinyDsa, tokenizer: Tokenizer, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Acceptance for k = 1, 2, 3 (and for k = 3 chained before the norm) over the greedy continuations, and
    the first twelve of these as text."""
    topk = model.config.index_topk
    continuations = greedy(model, prompts, max_tokens, topk)
    acceptance = {
        f"k{k}": replay_acceptance(model, continuations, topk, k) for k in range(1, MAX_MTP_STEPS + 1)
    }
    acceptance["k3/pre_norm_chain"] = replay_acceptance(
        model, continuations, topk, MAX_MTP_STEPS, chain_normed=False
    )
    samples = [
        (
            tokenizer.decode(prompt, skip_special_tokens=False),
            tokenizer.decode(continuations.completion(row), skip_special_tokens=False),
        )
        for row, prompt in enumerate(prompts[:12])
    ]
    return acceptance, samples
