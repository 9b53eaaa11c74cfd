"""Decoding with the bundled checkpoint on one GPU: the torch backend, Triton eager, Triton in CUDA graphs.

Run: python -m benchmarks.gpu_bundled [--tokens 128]

Greedy, prompts of 100 random tokens, the whole engine inside one process. Each figure is of a second run
over the same shapes: kernels are compiled and graphs captured in the first. The model is tiny (14 M
parameters), so that these are the costs of launches and of the host, not of bytes.
"""

import random
import time

import torch
import triton

from actors.shard import decode_graphs
from benchmarks.harness import inline_group, machine, parser, request

_CASES = (
    ("torch, float32", {"attention_backend": "torch", "dtype": "float32"}, 0),
    ("triton, bfloat16, eager", {"attention_backend": "triton", "dtype": "bfloat16"}, 0),
    ("triton, float32, graphs", {"attention_backend": "triton", "dtype": "float32"}, 64),
    ("triton, bfloat16, graphs", {"attention_backend": "triton", "dtype": "bfloat16"}, 64),
)


def seconds(batch: int, num_tokens: int, **settings) -> float:
    """Of the second run of `batch` requests."""
    group = inline_group(
        device="cuda",
        max_model_len=1024,
        max_num_seqs=batch,
        kv_cache_memory_bytes="256M",
        enable_prefix_caching=False,
        **settings,
    )
    generator = random.Random(0)
    prompts = [[generator.randrange(3, 6000) for _ in range(100)] for _ in range(batch)]
    for tag in ("first", "second"):
        for i, prompt in enumerate(prompts):
            group.submit(request(f"{tag}-{i}", prompt, num_tokens=num_tokens))
        start = time.perf_counter()
        while group.has_work:
            group.step()
    return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=128)
    num_tokens = arguments.parse_args().tokens
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_bundled needs a CUDA GPU, and this machine's torch finds none")
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}; {machine()}")
    print(f"{'':26} {'drafts':>6} {'batch':>6} {'tokens/s':>9} {'ms a token of each':>19}")
    for name, settings, max_graphs in _CASES:
        decode_graphs.MAX_GRAPHS = max_graphs
        for num_drafts in (0, 3):
            for batch in (1, 16, 64):
                taken = seconds(batch, num_tokens, num_speculative_tokens=num_drafts, **settings)
                rate = batch * num_tokens / taken
                print(
                    f"{name:26} {num_drafts:6} {batch:6} {rate:9.0f} {taken / num_tokens * 1e3:19.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
