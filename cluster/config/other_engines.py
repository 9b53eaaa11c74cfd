"""Names that people bring from other engines, and what stands for them here."""

import re

from kernels_integration.errors import ConfigError

_TP = "use --tensor-parallel-size or -tp"
_DCP = "use --decode-context-parallel-size or -dcp"
_EP = "use --enable-expert-parallel; experts are spread over the -tp shards"
_MODEL = "use --model, the directory of a checkpoint"
_LENGTH = "use --max-model-len"
_REQUESTS = "use --max-num-seqs"
_ROWS = "use --max-num-batched-tokens, which bounds the chunks of prompts"
_DRAFTS = "use --num-speculative-tokens"
_GROUPS = "use --num-groups"
_LAYERS = "layers are not spread over stages; spread each one by --tensor-parallel-size"
_DOWNLOAD = "nothing is downloaded; download the model first and pass its directory as --model"

OTHER_ENGINES = {
    "tp": _TP,
    "tp_size": _TP,
    "tensor_parallel": _TP,
    "dcp": _DCP,
    "dcp_size": _DCP,
    "ep": _EP,
    "ep_size": _EP,
    "dp": _GROUPS,
    "dp_size": _GROUPS,
    "pp": _LAYERS,
    "pp_size": _LAYERS,
    "pipeline_parallel_size": _LAYERS,
    "model_path": _MODEL,
    "tokenizer": _MODEL,
    "tokenizer_path": _MODEL,
    "context_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_running_requests": _REQUESTS,
    "max_batch_size": _REQUESTS,
    "chunked_prefill_size": _ROWS,
    "enable_chunked_prefill": _ROWS,
    "max_prefill_tokens": _ROWS,
    "max_num_tokens": _ROWS,
    "page_size": "use --block-size",
    "num_gpu_blocks_override": "use --num-kv-blocks",
    "max_total_tokens": "use --num-kv-blocks, times --block-size",
    "mem_fraction_static": "use --gpu-memory-utilization on a GPU, --kv-cache-memory-bytes on a CPU",
    "speculative_num_steps": _DRAFTS,
    "speculative_num_draft_tokens": _DRAFTS,
    "disable_radix_cache": "use --no-enable-prefix-caching",
    "async_scheduling": "use --scheduling deferred",
    "schedule_policy": "use --scheduling-policy",
    "random_seed": "use --seed",
    "enable_metrics": "use --metrics-port",
    "trust_remote_code": "nothing in a checkpoint is executed. Models are built in, weights are read from "
    "safetensors alone, and auto_map in config.json is ignored; leave it out",
    "api_key": "the server asks for no key; let it listen on a private address, behind a proxy that does",
    "quantization": "it is read from the checkpoint; leave it out",
    "download_dir": _DOWNLOAD,
    "revision": _DOWNLOAD,
    "hf_token": _DOWNLOAD,
    "enable_auto_tool_choice": "tools may be called wherever a request gives some; leave it out",
    "swap_space": "preempted requests are computed again, nothing is swapped; leave it out",
    "cpu_offload_gb": "weights stay where they compute; spread them by --tensor-parallel-size",
    "distributed_executor_backend": "groups run on Ray; generate and batch also take --executor inline",
}
"""Name with underscores -> what to do. None of them is a setting or a flag here."""


def refuse_foreign(name: str, *, as_keyword: bool = False) -> None:
    """Errors: ConfigError that says what to do instead of a name of another engine.

    as_keyword: spell settings as Python's keywords.
    """
    if name in OTHER_ENGINES:
        words = OTHER_ENGINES[name]
        raise ConfigError(f"there is no {name}: {_in_python(words) if as_keyword else words}")


def _in_python(words: str) -> str:
    words = re.sub(r" or -\w+", "", words)
    words = re.sub(r"--no-([a-z-]+)", r"--\1=False", words)
    return re.sub(r"--([a-z-]+)", lambda match: match[1].replace("-", "_"), words)
