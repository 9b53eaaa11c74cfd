"""What formats of the KV cache cost and save, on the bundled checkpoint's held-out text.

    OMP_NUM_THREADS=1 python -m benchmarks.kv_formats [--prompts 32] [--new-tokens 64]

1. Bytes of a token, and tokens in 512 MiB.
2. On the same tokens (prompts of up to 300): share of positions whose likeliest token differs from a float32
   cache's; by how many nats the best led there (90th percentile, most); mean loss of the actual tokens.
3. Greedy streams with 3 drafts: share of streams that equal a float32 cache's to their end, share of tokens
   before the first difference, tokens per verify.
4. Microseconds that one thread takes to read 1024 vectors, of DeepSeek-V3.2's and the bundled widths.

The numbers of 2 and 3 do not depend on the machine.
"""

import json
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from tokenizers import Tokenizer

from actors.inline_group import InlineGroup
from actors.model.config import ModelConfig
from actors.requests import Request, RequestUpdate, TokenLogprob
from actors.sampling_params import SamplingParams
from benchmarks import harness
from cluster.config.args import BUNDLED_CHECKPOINT
from cluster.report.kv_report import group_kv_bytes_per_token
from kernels_integration.kv_formats import StoredVectors, latent_format
from kernels_integration.kv_layout import KVLayout

FORMATS = [
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("bfloat16", "fp8"),
    ("fp8_ds_mla", "float32"),
    ("fp8_ds_mla", "auto"),
]
NUM_DRAFTS = 3
MAX_SCORED = 300


def texts(num_prompts: int) -> list[list[int]]:
    """Token ids of held-out passages."""
    backend = Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))
    passages = json.loads((BUNDLED_CHECKPOINT / "heldout_prompts.json").read_text())["text"]
    return [
        [0, *backend.encode(text, add_special_tokens=False).ids][:MAX_SCORED]
        for _, text in passages[:num_prompts]
    ]


def answer(
    group: InlineGroup, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[RequestUpdate]]:
    for i, prompt in enumerate(prompts):
        group.submit(
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                params=params,
                seed=0,
                eos_token_ids=(1,),
            )
        )
    updates: list[list[RequestUpdate]] = [[] for _ in prompts]
    while group.has_work:
        for update in group.step():
            assert isinstance(update, RequestUpdate)
            updates[int(update.request_id)].append(update)
    return updates


def common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


class Result:
    """All that one format yields."""

    def __init__(self, formats: tuple[str, str], prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        config = harness.config(
            dtype="float32",
            kv_cache_dtype=formats[0],
            indexer_kv_dtype=formats[1],
            num_speculative_tokens=NUM_DRAFTS,
            dynamic_speculative_decoding=False,  # its choices follow the clock
            max_num_seqs=16,
            max_num_batched_tokens=512,
        )
        self.name = f"{config.kv_cache_dtype} + {config.indexer_kv_dtype}"
        self.bytes_per_token = group_kv_bytes_per_token(config)
        self.num_tokens = config.num_kv_blocks * config.tokens_per_block
        group = InlineGroup(config)
        scored = answer(group, prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2))
        self.scored: list[TokenLogprob] = [at for updates in scored for at in updates[0].prompt_logprobs]
        begins = [prompt[:96] for prompt in prompts]
        drafted = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        streams = answer(group, begins, drafted)
        self.streams = [[t for update in updates for t in update.token_ids] for updates in streams]
        self.tokens_per_verify = group.stats().tokens_per_verify
        group.close()

    def row(self, exact: "Result") -> list[str]:
        leads = [
            a.top[0][1] - a.top[1][1]
            for a, b in zip(exact.scored, self.scored, strict=True)
            if a.top[0][0] != b.top[0][0]
        ]
        pairs = list(zip(exact.streams, self.streams, strict=True))
        common = sum(common_length(*pair) for pair in pairs)
        return [
            f"{self.name:22}",
            f"{self.bytes_per_token:6}",
            f"{self.num_tokens:8}",
            f"{len(leads) / len(self.scored):8.2%}",
            f"{sorted(leads)[int(0.9 * len(leads))] if leads else 0:6.2f}",
            f"{max(leads, default=0):6.2f}",
            f"{-statistics.mean(at.logprob for at in self.scored):8.4f}",
            f"{sum(a == b for a, b in pairs) / len(pairs):8.1%}",
            f"{common / sum(len(a) for a, _ in pairs):8.1%}",
            f"{self.tokens_per_verify:8.2f}",
        ]


def read_times(rank: int, rope: int) -> list[float]:
    """float32, bfloat16, fp8_ds_mla."""
    slots = torch.randint(8192, (1024,))
    times = []
    for name in ("float32", "bfloat16", "fp8_ds_mla"):
        layout = KVLayout(
            kv_cache_dtype=name, indexer_kv_dtype="fp8", latent_rank=rank, rope_dim=rope, index_dim=0
        )
        stored = StoredVectors.allocate(8192, latent_format(layout))
        stored.write(torch.arange(8192), torch.randn(8192, rank + rope))
        times.append(harness.best_us(partial(stored.gather, slots, torch.float32), rounds=50))
    return times


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    print(harness.machine())
    torch.set_num_threads(1)
    prompts = texts(args.prompts)
    results = [Result(formats, prompts, args.new_tokens) for formats in FORMATS]
    exact = results[0]
    median = statistics.median(at.top[0][1] - at.top[1][1] for at in exact.scored)
    print(
        f"{len(exact.scored)} scored tokens, where the best leads by {median:.2f} nats (median); "
        f"{len(prompts)} streams of {args.new_tokens} tokens"
    )
    names = ("bytes", "tokens", "differs", "lead90", "most", "loss", "whole", "prefix", "verify")
    widths = (6, 8, 8, 6, 6, 8, 8, 8, 8)
    print(f"{'latents + keys':22}", *(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for result in results:
        print(*result.row(exact))
    config = ModelConfig.from_pretrained(BUNDLED_CHECKPOINT)
    for rank, rope in ((512, 64), (config.kv_lora_rank, config.qk_rope_head_dim)):
        times = ", ".join(f"{us:.0f}" for us in read_times(rank, rope))
        print(f"reading 1024 vectors of {rank} + {rope}, float32, bfloat16, fp8_ds_mla: {times} us")


if __name__ == "__main__":
    main()
