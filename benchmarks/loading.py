"""Seconds and peak memory of loading, against transformers: `python -m benchmarks.loading`.

A random checkpoint of 1 GB each in bfloat16 and in FP8 is written to a temporary directory, and loaded for
computation in bfloat16. Every load is a fresh process; its peak is counted from what it holds after it has
loaded a small model, so that libraries do not count. The files are in the page cache: what is measured is
work and memory, not the disk. transformers needs the package accelerate for FP8.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.load_progress import LoadProgress
from actors.model.model import load_model, measure_shard
from actors.model.tensors import main_tensor_shapes
from benchmarks import harness
from cluster.config import BUNDLED_CHECKPOINT
from cluster.config.sizes import format_size
from kernels_integration.collectives import SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.reference.backend import TorchBackend

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 10,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 2048,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
NUM_EXPERTS = {"bfloat16": 32, "fp8": 66}
"""That make 1 GB."""
FILE_BYTES = 200 * 10**6
KEPT_HIGH = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj")


def write_checkpoint(path: Path, kind: str) -> int:
    """Files of random weights and their index; returns the bytes of the weights."""
    raw: dict[str, object] = {**CONFIG, "n_routed_experts": NUM_EXPERTS[kind]}
    if kind == "fp8":
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    batch: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    total = 0

    def write_file() -> None:
        file = f"model-{total}.safetensors"
        save_file(batch, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(batch, file))
        batch.clear()

    for name, tensor in _random_tensors(ModelConfig.from_dict(raw), is_fp8=kind == "fp8"):
        batch[name] = tensor
        total += tensor.nbytes
        if sum(held.nbytes for held in batch.values()) > FILE_BYTES:
            write_file()
    write_file()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))  # transformers needs one
    return total


def _random_tensors(config: ModelConfig, *, is_fp8: bool) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, shape in main_tensor_shapes(config).items():
        if is_fp8 and len(shape) == 2 and not any(part in name for part in KEPT_HIGH):
            stored = torch.empty(shape[0], shape[1] // 8, dtype=torch.int64).random_(generator=generator)
            stored = stored.view(torch.uint8)
            stored[(stored & 0x7F) == 0x7F] = 0  # NaN
            yield name, stored.view(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in shape]
            yield f"{name}_scale_inv", torch.rand(blocks, generator=generator) * 1e-4
        else:
            yield name, torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03, generator=generator)


def load_ours(path: Path, rank: int, size: int) -> Callable[[], object]:
    config = ModelConfig.from_pretrained(path)
    tp = InProcessCollectives.create(size)[rank]  # loading talks to nobody

    def load() -> object:
        return load_model(
            config,
            path,
            dtype=torch.bfloat16,
            backend=TorchBackend(torch.bfloat16),
            tp=tp,
            dcp=DcpGroup(1, SoloCollectives()),
            num_mtp_layers=0,
            progress=LoadProgress(),
        )

    return load


def load_transformers(path: Path) -> Callable[[], object]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loader = transformers.DeepseekV32ForCausalLM  # imports the model's module

    return lambda: loader.from_pretrained(path, dtype=torch.bfloat16)


def measure(load: Callable[[], object]) -> dict[str, float]:
    """In this process: seconds, peak above what was held before, and what is held afterwards."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the warm-up has freed is no start for this load
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start_s = _status("VmRSS"), time.perf_counter()
    model = load()
    seconds = time.perf_counter() - start_s
    result = {"seconds": seconds, "peak": _status("VmHWM") - before, "held": _status("VmRSS") - before}
    del model
    return result


def _status(field: str) -> int:
    """Bytes of a line such as "VmRSS:   1234 kB"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run(path: Path, loader: str, size: int, threads: int) -> list[dict[str, float]]:
    """One process per rank, at the same time; nothing where one fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loading", "--one", loader, str(path), str(rank), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return []
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def slice_bytes(path: Path, rank: int, size: int) -> int:
    config = ModelConfig.from_pretrained(path)
    tp = InProcessCollectives.create(size)[rank]
    with Checkpoint(path, config.weight_block_size) as checkpoint:
        bytes_of_rank = measure_shard(
            config,
            checkpoint.tensors,
            dtype=torch.bfloat16,
            backend=TorchBackend(torch.bfloat16),
            tp=tp,
            dcp=DcpGroup(1, SoloCollectives()),
            num_mtp_layers=0,
        )
    return bytes_of_rank.weight_bytes


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--one", nargs=4, metavar=("LOADER", "PATH", "RANK", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind; the fastest is shown")
    args = parser.parse_args()
    if args.one is not None:
        loader, path, rank, size = args.one
        for directory in (BUNDLED_CHECKPOINT, Path(path)):  # the first one warms up
            if loader == "transformers":
                load = load_transformers(directory)
            else:
                load = load_ours(directory, int(rank), int(size))
            result = measure(load)
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as directory:
        if shutil.disk_usage(directory).free < 4 * 10**9:
            raise SystemExit(f"{directory} has less than 4 GB free; set TMPDIR to another place")
        for kind in NUM_EXPERTS:
            path = Path(directory) / kind
            print(f"{kind}: {format_size(write_checkpoint(path, kind))} of files", flush=True)
            for loader, size in (("transformers", 1), ("latentray", 1), ("latentray", 2)):
                runs = [run(path, loader, size, args.threads) for _ in range(args.repeats)]
                if not all(runs):
                    print(f"  {loader:12} tp {size}: cannot load it", flush=True)
                    continue
                seconds = min(max(one["seconds"] for one in ranks) for ranks in runs)
                peak = max(one["peak"] for ranks in runs for one in ranks)
                slice_of_rank = slice_bytes(path, 0, size)
                print(
                    f"  {loader:12} tp {size}: {seconds:5.2f} s, peak {format_size(int(peak))} = slice "
                    f"{format_size(slice_of_rank)} {100 * (peak / slice_of_rank - 1):+.1f} %",
                    flush=True,
                )
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
