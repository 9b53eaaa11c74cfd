"""Check a checkpoint against transformers on a CPU, with a speculative loop written for this purpose.

    python -m recipes.tiny_dsa.verify CHECKPOINT [--val val.bin] [--prompts heldout_prompts.json]

Prints (JSON): with --val, the loss on held-out windows with the shipped top-k and with dense attention;
generated samples; and a greedy speculative decoding run (drafts of the MTP layer, verified by the main model)
for k = 1, 2, 3, compared token by token with plain greedy decoding. The speculative loop caches nothing: it
is slow.
"""

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from recipes.tiny_dsa.acceptance import acceptance_report
from recipes.tiny_dsa.checkpoint import read_tensors
from recipes.tiny_dsa.evaluation import EVALUATION_WINDOWS, MAX_MTP_STEPS
from recipes.tiny_dsa.hub_model import HubModel
from recipes.tiny_dsa.vocabulary import BOS, EOS

TEXT_PROMPT_TOKENS = 80
SAMPLE_QUESTIONS = (
    "What is the capital of France?",
    "What is a computer?",
    "Where is Egypt?",
    "What does happy mean?",
    "Hello!",
)
SAMPLE_TEXTS = (
    "The history of",
    "It is a truth universally acknowledged, that",
    "The function returns",
    "Python is",
)
SPECULATIVE_QUESTIONS = (
    "What is the capital of Norway?",
    "What is a computer?",
    "Tell me about Egypt.",
    "What does it mean to run?",
)


class MtpLayer(torch.nn.Module):
    """The layer after the main model's: enorm, hnorm, eh_proj, one decoder block, shared_head.norm."""

    def __init__(self, path: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        layer = config.num_hidden_layers
        config = copy.deepcopy(config)
        config.num_hidden_layers = layer + 1
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        config._attn_implementation = "eager"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.block = deepseek_v32.DeepseekV32DecoderLayer(config, layer)
        self.enorm, self.hnorm, self.norm = (deepseek_v32.DeepseekV32RMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.rotary = deepseek_v32.DeepseekV32RotaryEmbedding(config)

        tensors = dict(read_tensors(path, f"model.layers.{layer}."))
        experts = [
            {part: tensors.pop(f"mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(config.n_routed_experts)
        ]
        tensors["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([parts["gate"], parts["up"]]) for parts in experts]
        )
        tensors["mlp.experts.down_proj"] = torch.stack([parts["down"] for parts in experts])
        own_names = {
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "eh_proj.weight": "eh_proj.weight",
            "shared_head.norm.weight": "norm.weight",
        }
        state = {own_names.get(name, f"block.{name}"): tensor for name, tensor in tensors.items()}
        missing, unexpected = self.load_state_dict(state, strict=False)
        missing = [name for name in missing if "inv_freq" not in name]
        if missing or unexpected:
            raise ValueError(f"{path}: MTP layer {layer} lacks {missing} and holds unexpected {unexpected}")
        self.to(dtype)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Head inputs [1, S, H] from the state before each token and the token's embedding."""
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))
        window = x.shape[1]
        positions = torch.arange(window)[None]
        mask = torch.full((window, window), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        x = self.block(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions),
        )
        return self.norm(x[0] if isinstance(x, tuple) else x)


@torch.no_grad()
def speculative(
    model: PreTrainedModel, mtp: MtpLayer, prompt: Sequence[int], max_tokens: int, k: int
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding without caches: new tokens, and rounds by the number of accepted drafts."""
    tokens, counts = list(prompt), [0] * (k + 1)
    embed, head = model.model.embed_tokens, model.lm_head

    def hidden_states(token_ids: list[int]) -> Tensor:
        return model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state

    h = hidden_states(tokens)
    tokens.append(int(head(h[0, -1]).argmax()))
    while len(tokens) - len(prompt) < max_tokens and tokens[-1] != EOS:
        states = h[:, : len(tokens) - 1]
        draft: list[int] = []
        for _ in range(k):
            out = mtp(states, embed(torch.tensor([(tokens + draft)[1:]])))
            draft.append(int(head(out[0, -1]).argmax()))
            # a later draft reads the MTP layer's own state where the main model has none
            states = torch.cat([states, out[:, -1:]], 1)
        h = hidden_states(tokens + draft)
        choices = head(h[0, len(tokens) - 1 :]).argmax(-1).tolist()
        accepted = 0
        while accepted < k and draft[accepted] == choices[accepted]:
            accepted += 1
        counts[accepted] += 1
        tokens += choices[: accepted + 1]
        if EOS in tokens[len(prompt) :]:
            tokens = tokens[: tokens.index(EOS, len(prompt)) + 1]
    return tokens[len(prompt) :][:max_tokens], counts


def set_index_topk(model: PreTrainedModel, topk: int) -> None:
    for module in model.modules():
        if isinstance(module, deepseek_v32.DeepseekV32Indexer):
            module.index_topk = topk


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokens: npt.NDArray[np.uint16], window: int, num_windows: int) -> float:
    """Nats a token over evenly spaced windows."""
    total = 0.0
    for start in np.linspace(0, len(tokens) - window - 2, num_windows).astype(int):
        ids = torch.from_numpy(tokens[start : start + window + 1].astype(np.int64))[None]
        logits = model(ids[:, :window], use_cache=False).logits.float()
        total += float(F.cross_entropy(logits[0], ids[0, 1:]))
    return total / num_windows


def held_out_losses(model: PreTrainedModel, path: Path, num_windows: int) -> dict[str, float]:
    """Losses with the shipped top-k and dense; `num_windows` windows of 512, fewer of longer ones."""
    tokens = np.fromfile(path, dtype=np.uint16)
    shipped = model.config.index_topk
    losses = {}
    for window in EVALUATION_WINDOWS:
        for topk, label in ((shipped, f"top{shipped}"), (window, "dense")):
            set_index_topk(model, topk)
            loss = mean_loss(model, tokens, window, max(2, num_windows * 512 // window))
            losses[f"loss/{window}/{label}"] = round(loss, 4)
    set_index_topk(model, shipped)
    return losses


def generate_samples(hub: HubModel, max_tokens: int) -> dict[str, str]:
    """Greedy answers, and continuations at temperature 0.7."""
    samples = {question: hub.answer(question, max_tokens) for question in SAMPLE_QUESTIONS}
    torch.manual_seed(0)
    for text in SAMPLE_TEXTS:
        prompt = [BOS, *hub.tokenizer(text, add_special_tokens=False)["input_ids"]]
        completion = hub.generate(prompt, max_tokens, temperature=0.7, top_p=0.9)
        samples[f"{text} (T 0.7)"] = hub.text(completion)
    return samples


def speculative_prompts(hub: HubModel, path: Path | None, num_texts: int) -> list[list[int]]:
    """Four questions and the beginnings of `num_texts` held-out passages."""
    prompts = [hub.question_ids(question) for question in SPECULATIVE_QUESTIONS]
    if path is not None:
        passages = json.loads(path.read_text(encoding="utf-8"))["text"][:num_texts]
        for _, passage in passages:
            ids = hub.tokenizer(passage, add_special_tokens=False)["input_ids"]
            prompts.append([BOS, *ids[:TEXT_PROMPT_TOKENS]])
    return prompts


def compare_speculative(
    hub: HubModel, mtp: MtpLayer, prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """Acceptance for k = 1, 2, 3, and on how many prompts the tokens are those of plain greedy decoding."""
    plain = [hub.generate(prompt, max_tokens) for prompt in prompts]
    reports = {}
    for k in range(1, MAX_MTP_STEPS + 1):
        totals, num_same = np.zeros(k + 1, dtype=int), 0
        for prompt, expected in zip(prompts, plain, strict=True):
            tokens, counts = speculative(hub.model, mtp, prompt, max_tokens, k)
            totals += np.array(counts)
            num_same += tokens == expected
        reports[f"k{k}"] = {
            **acceptance_report(totals.tolist()),
            "same_as_greedy": f"{num_same}/{len(prompts)}",
        }
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="folder of the checkpoint")
    parser.add_argument("--val", type=Path, help="data.py's val.bin")
    parser.add_argument(
        "--prompts", type=Path, help="val_prompts.json or the checkpoint's heldout_prompts.json"
    )
    parser.add_argument("--n", type=int, default=6, help="held-out passages for the speculative run")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate, also of each sample")
    parser.add_argument("--windows", type=int, default=12, help="held-out windows of 512 tokens")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    hub = HubModel(args.path, dtype)
    mtp = MtpLayer(args.path, hub.model.config, dtype).eval()
    report: dict[str, Any] = {
        "class": type(hub.model).__name__,
        "parameters_main": sum(param.numel() for param in hub.model.parameters()),
        "parameters_mtp": sum(param.numel() for param in mtp.parameters()),
        "dtype": args.dtype,
    }
    if args.val:
        report |= held_out_losses(hub.model, args.val, args.windows)
    report["samples"] = generate_samples(hub, args.new)
    start = time.perf_counter()
    prompts = speculative_prompts(hub, args.prompts, args.n)
    report["speculative"] = compare_speculative(hub, mtp, prompts, args.new)
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
