"""Train the tiny DSA + MTP checkpoint on one GPU within a wall-clock budget.

    python -m recipes.tiny_dsa.train --data DATA --out CHECKPOINT --seconds 450

Phases by elapsed fraction: (1) dense attention, window 512; (2) the same with the indexers learning from the
attention probabilities (KL, detached), window 1024; (3) sparse top-k attention, KL on the chosen set, MTP
recursive to depth 3 with the main model's distribution as its target, window 1024; (4) the same, window 2048.

Writes config.json, the shards, their index and result.json (log and measurements). A smoke run without a GPU:
--device cpu --no-compile --no-evaluation --tokens 2048 --seconds 60.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.tiny_dsa.checkpoint import save_checkpoint
from recipes.tiny_dsa.evaluation import (
    MAX_MTP_STEPS,
    evaluate,
    evaluation_prompts,
    loss_table,
    sample_and_replay,
    text_agreement,
)
from recipes.tiny_dsa.losses import (
    cross_entropy,
    cross_entropy_and_logits,
    soft_cross_entropy,
)
from recipes.tiny_dsa.model import AttentionMode, TinyDsa
from recipes.tiny_dsa.optimizer import Optimizer, orthogonalise
from recipes.tiny_dsa.parameters import TinyConfig, init_params

MTP_LOSS_WEIGHTS = (0.3, 0.2, 0.15)
BIAS_STEP = 2e-3
WARMUP_STEPS = 100
DECAY_START = 0.40
LOG_STEPS = (1, 5, 20, 50)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What is trained until this fraction of the time has passed."""

    until: float
    window: int
    mode: AttentionMode
    mtp_steps: int
    soft_targets: bool


PHASES = (
    Phase(until=0.46, window=512, mode="flash", mtp_steps=1, soft_targets=False),
    Phase(until=0.58, window=1024, mode="dense", mtp_steps=1, soft_targets=False),
    Phase(until=0.86, window=1024, mode="sparse", mtp_steps=3, soft_targets=True),
    Phase(until=1.00, window=2048, mode="sparse", mtp_steps=3, soft_targets=True),
)


class StepLosses(NamedTuple):
    total: Tensor
    main: Tensor
    mtp: list[Tensor]
    kl: list[Tensor]
    expert_loads: dict[int, Tensor]


def log(*values: object) -> None:
    print(*values, flush=True)


def read_tokens(path: Path, device: str) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up by steps, then constant, then a linear decay by elapsed fraction to 2 %."""
    warmup = min(1, (step + 1) / WARMUP_STEPS)
    decay = 1.0 if progress < DECAY_START else max(0.02, (1 - progress) / (1 - DECAY_START))
    return peak * warmup * decay


class Trainer:
    """Model, data and optimizers of one run."""

    def __init__(
        self,
        config: TinyConfig,
        train_tokens: Tensor,
        *,
        device: str,
        peak_learning_rate: float,
        tokens_per_step: int,
        adam_only: bool,
        compiled: bool,
    ) -> None:
        def maybe_compile(function: Function) -> Function:
            return torch.compile(function, dynamic=False) if compiled else function

        if compiled:
            # one graph a phase, layer kind and MTP step
            torch._dynamo.config.recompile_limit = 64
        self.config, self.device = config, device
        self.train_tokens, self.tokens_per_step = train_tokens, tokens_per_step
        self.peak_learning_rate = peak_learning_rate
        self.params = init_params(config, device)
        self.model = TinyDsa(config, self.params, compiled=compiled)
        # evaluation has many shapes: not worth compiling
        self.eager_model = TinyDsa(config, self.params)
        self.optimizer = Optimizer(
            self.params,
            learning_rate=peak_learning_rate,
            adam_only=adam_only,
            orthogonalise=maybe_compile(orthogonalise),
        )
        self._cross_entropy = maybe_compile(cross_entropy)
        self._cross_entropy_and_logits = maybe_compile(cross_entropy_and_logits)
        self._soft_cross_entropy = maybe_compile(soft_cross_entropy)
        self._correction_biases = {
            int(name.split(".")[2]): param
            for name, param in self.params.items()
            if name.endswith("correction_bias")
        }
        self._generator = torch.Generator(device=device).manual_seed(1)

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.params.values())

    def draw_batch(self, window: int) -> Tensor:
        """Random windows [B, S + 4] of the training stream."""
        last = len(self.train_tokens) - window - 5
        batch_size = self.tokens_per_step // window
        starts = torch.randint(0, last, (batch_size,), device=self.device, generator=self._generator)
        offsets = torch.arange(window + 1 + MAX_MTP_STEPS, device=self.device)
        return self.train_tokens[starts[:, None] + offsets].long()

    def losses(self, phase: Phase) -> StepLosses:
        """Losses of a fresh batch."""
        window, topk, head = phase.window, self.config.index_topk, self.params["lm_head.weight"]
        ids = self.draw_batch(window)
        main_out = self.model.main(ids[:, :window], phase.mode, topk)
        (h,) = main_out.hidden
        mtp_out = self.model.mtp(h, ids, phase.mtp_steps, phase.mode, topk)
        targets = ids[:, 1 : window + 1]
        mtp = []
        if phase.soft_targets:
            main, logits = self._cross_entropy_and_logits(h, head, targets)
            teacher = logits.detach().view(len(ids), window, -1)
            for j, out in enumerate(mtp_out.hidden, 1):
                # the last j rows have no teacher inside the window
                has_teacher = torch.arange(window, device=self.device) < window - j
                shifted = torch.roll(teacher, -j, 1).flatten(0, 1)
                row_weights = has_teacher.float().repeat(len(ids))
                mtp.append(self._soft_cross_entropy(out, head.detach(), shifted, row_weights))
        else:
            main = self._cross_entropy(h, head, targets)
            mtp = [
                self._cross_entropy(out, head, ids[:, j + 1 : j + 1 + window])
                for j, out in enumerate(mtp_out.hidden, 1)
            ]
        kl = main_out.kl + mtp_out.kl
        total = main + sum(weight * loss for weight, loss in zip(MTP_LOSS_WEIGHTS, mtp, strict=False))
        if kl:
            total = total + sum(kl)
        return StepLosses(total, main, mtp, kl, {**main_out.expert_loads, **mtp_out.expert_loads})

    def compile_phase(self, phase: Phase) -> None:
        """Runs one step without an update, so that compilation does not count."""
        self.losses(phase).total.backward()
        self.optimizer.clear_gradients()
        if self.train_tokens.is_cuda:
            torch.cuda.synchronize()

    def step(self, phase: Phase, rate: float) -> StepLosses:
        losses = self.losses(phase)
        losses.total.backward()
        self.optimizer.step(rate)
        with torch.no_grad():
            for layer, load in losses.expert_loads.items():
                bias_step = BIAS_STEP * rate / self.peak_learning_rate
                self._correction_biases[layer] += bias_step * torch.sign(load.mean() - load)
        return losses

    def round_weights(self) -> None:
        """Rounds the parameters to what the checkpoint holds."""
        with torch.no_grad():
            for param in self.optimizer.params:
                param.copy_(param.to(torch.bfloat16).float())


def loss_record(losses: StepLosses) -> dict[str, Any]:
    """Numbers for the log; "load" is the busiest expert's over the mean, in the first routed layer."""
    record: dict[str, Any] = {
        "lm": round(losses.main.item(), 4),
        "mtp": [round(loss.item(), 4) for loss in losses.mtp],
        "kl": round(sum(losses.kl).item() / len(losses.kl), 4) if losses.kl else None,
    }
    load = losses.expert_loads[min(losses.expert_loads)]
    record["load"] = round((load.max() / load.mean()).item(), 2)
    return record


def train(trainer: Trainer, val_tokens: Tensor, seconds: float, only_phase: int | None) -> dict[str, Any]:
    """Trains for `seconds` and returns the run's log."""
    start = time.perf_counter()
    step, seen, phase_index, history = 0, 0, None, []
    while (progress := (time.perf_counter() - start) / seconds) < 1:
        previous = phase_index
        if only_phase is not None:
            phase_index = only_phase
        else:
            phase_index = next(i for i, phase in enumerate(PHASES) if progress < phase.until)
        phase = PHASES[phase_index]
        if previous not in (None, phase_index):
            loss, mtp_losses = evaluate(
                trainer.eager_model, val_tokens, 512, "flash", trainer.config.index_topk
            )
            log(
                f"-- end of phase {previous}: step {step} seen {seen / 1e6:.1f}M val(dense,512) {loss:.4f} "
                f"mtp {mtp_losses[0]:.4f} at {time.perf_counter() - start:.0f}s"
            )
        rate = learning_rate(trainer.peak_learning_rate, step, progress)
        losses = trainer.step(phase, rate)
        step += 1
        seen += trainer.tokens_per_step // phase.window * phase.window
        if step % 100 == 0 or step in LOG_STEPS:
            record = {
                "step": step,
                "s": round(time.perf_counter() - start, 1),
                "M": round(seen / 1e6, 1),
                "phase": phase_index,
                "lr": round(rate, 6),
                **loss_record(losses),
            }
            history.append(record)
            log(json.dumps(record))
    elapsed = time.perf_counter() - start
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if val_tokens.is_cuda else 0
    log(
        f"trained {step} steps, {seen / 1e6:.1f}M tokens in {elapsed:.0f}s, "
        f"{seen / elapsed / 1e3:.0f}k tok/s; peak GB {peak_gb:.1f}"
    )
    return {
        "steps": step,
        "tokens": seen,
        "seconds": round(elapsed, 1),
        "parameters": trainer.num_params,
        "history": history,
    }


def final_evaluation(trainer: Trainer, val_tokens: Tensor, data: Path) -> dict[str, Any]:
    """Everything the checkpoint's README reports, measured on the rounded weights."""
    start = time.perf_counter()
    trainer.round_weights()
    model = trainer.eager_model
    losses = loss_table(model, val_tokens)
    agreement = text_agreement(model, val_tokens, 512, model.config.index_topk)
    log(json.dumps(losses, indent=1), json.dumps(agreement))
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    acceptance, samples = {}, {}
    for name, (prompts, max_tokens) in evaluation_prompts(tokenizer, data / "val_prompts.json").items():
        of_set, samples[name] = sample_and_replay(model, tokenizer, prompts, max_tokens)
        acceptance.update({f"{name}/{case}": report for case, report in of_set.items()})
        log(name, json.dumps(of_set))
        for prompt, completion in samples[name][:10]:
            log("  >", prompt[-200:], "|||", completion)
    log(f"final evaluation {time.perf_counter() - start:.0f}s")
    return {"val": losses, "mtp_on_held_out_text": agreement, "accept": acceptance, "samples": samples}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="data.py's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seconds", type=float, default=450, help="without compilation and evaluation")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--adam-only", action="store_true", help="AdamW for the matrices too")
    parser.add_argument(
        "--only-phase",
        type=int,
        choices=range(len(PHASES)),
        help="spend the whole budget on one phase (for trials)",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-evaluation", action="store_true", help="skip the final evaluation")
    parser.add_argument("--override", default="{}", help="JSON over the model's configuration")
    args = parser.parse_args()
    try:
        args.config = dataclasses.replace(TinyConfig(), **json.loads(args.override))
    except (TypeError, json.JSONDecodeError) as error:
        parser.error(f"--override {args.override}: {error}; use a JSON object of TinyConfig's fields")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: no CUDA device found. The recipe needs one GPU; for a smoke run on the CPU use "
            "--device cpu --no-compile --no-evaluation --tokens 2048 --seconds 60"
        )
    window = max(phase.window for phase in selected_phases(args.only_phase))
    if args.tokens < window:
        parser.error(f"--tokens {args.tokens}: a step holds at least one window; use {window} or more")
    return args


def selected_phases(only_phase: int | None) -> tuple[Phase, ...]:
    return PHASES if only_phase is None else (PHASES[only_phase],)


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config: TinyConfig = args.config
    train_tokens = read_tokens(args.data / "train.bin", args.device)
    val_tokens = read_tokens(args.data / "val.bin", args.device)
    trainer = Trainer(
        config,
        train_tokens,
        device=args.device,
        peak_learning_rate=args.lr,
        tokens_per_step=args.tokens,
        adam_only=args.adam_only,
        compiled=not args.no_compile,
    )
    log("parameters", trainer.num_params, "train tokens", len(train_tokens))
    if not args.no_compile:
        for phase in selected_phases(args.only_phase):
            start = time.perf_counter()
            trainer.compile_phase(phase)
            log(f"compiled {phase} in {time.perf_counter() - start:.1f}s")

    result = train(trainer, val_tokens, args.seconds, args.only_phase)
    save_checkpoint(trainer.params, config, args.out)
    result_path: Path = args.out / "result.json"
    result_path.write_text(json.dumps(result), encoding="utf-8")
    if not args.no_evaluation:
        result |= final_evaluation(trainer, val_tokens, args.data)
        result_path.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
