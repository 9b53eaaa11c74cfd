"""Every setting of an engine, spelled as in vLLM. Flags, environment, file and keywords derive from here.

docs/extending.md says how to add one.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from cluster.config.setting import Setting, SettingsModel
from cluster.config.values import (
    Count,
    CountOrAll,
    CountOrZero,
    DraftTable,
    DType,
    FilePath,
    IndexerKVDtype,
    KVCacheDtype,
    NumDrafts,
    Seconds,
    Seed,
    Share,
    Size,
    SmallCount,
    SpeculativeConfig,
    Text,
    ThreadCount,
    parse_json,
)

BUNDLED_CHECKPOINT = Path(__file__).resolve().parent.parent / "assets" / "tiny-dsa"


class EngineArgs(SettingsModel):
    """Settings of one engine: a group, and how it is placed. None: derived by `cluster.config.resolve`."""

    model: Annotated[
        FilePath,
        Setting(
            "Directory of the checkpoint: config.json, tokenizer.json, *.safetensors.",
            rule="the directory of a checkpoint",
            group="Model",
            metavar="PATH",
            shown_default=f"the bundled {BUNDLED_CHECKPOINT.name}",
        ),
    ] = str(BUNDLED_CHECKPOINT)
    served_model_name: Annotated[
        Text | None,
        Setting(
            "Name that clients ask for.",
            rule="a name",
            group="Model",
            metavar="NAME",
            shown_default="the value of --model",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Setting(
            "auto reads the checkpoint's *.safetensors. dummy makes random weights in the shapes of its "
            "config.json: for measurements.",
            group="Model",
        ),
    ] = "auto"
    dtype: Annotated[
        DType,
        Setting("Computation. auto is float32.", group="Model"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Setting(
            "What the shards compute on. auto is cuda where this machine's torch finds a GPU and one shard "
            "is asked for, else cpu.",
            group="Model",
        ),
    ] = "auto"
    max_model_len: Annotated[
        Count | None,
        Setting(
            "Tokens of prompt and completion together, at most.",
            group="Model",
            shown_default="the checkpoint's, as far as the KV cache holds it",
        ),
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "hf", "deepseek_v32"],
        Setting(
            "How chats become text. hf: by the chat template. deepseek_v32: by DeepSeek-V3.2's "
            "encoding. auto: by that where a deepseek_v32 checkpoint has no template.",
            group="Model",
        ),
    ] = "auto"
    chat_template: Annotated[
        FilePath | None,
        Setting(
            "File of a Jinja template for chats.",
            rule="a file that holds a Jinja template",
            group="Model",
            metavar="FILE",
            shown_default="the checkpoint's",
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "glm47"],
        Setting(
            "How the model calls tools, by vLLM's names, for OpenAI's API. auto: as its chat template "
            "writes it.",
            group="Model",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "deepseek_v3", "glm45"],
        Setting(
            "Whether <think> and </think> divide thoughts from answers. auto: where the chat template "
            "writes them.",
            group="Model",
        ),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Setting(
            "Sampling parameters that requests leave open. auto: those of the checkpoint's "
            "generation_config.json. vllm: neutral ones.",
            group="Model",
        ),
    ] = "auto"
    max_logprobs: Annotated[
        CountOrAll,
        Setting("Alternatives that a request may ask for; -1: the whole vocabulary.", group="Model"),
    ] = 20
    seed: Annotated[
        Seed,
        Setting("Requests without a seed of their own draw theirs from it.", group="Model"),
    ] = 0

    tensor_parallel_size: Annotated[
        Count,
        Setting("Shards of the group.", group="Parallelism", short="-tp"),
    ] = 1
    decode_context_parallel_size: Annotated[
        Count,
        Setting(
            "Shards that divide a sequence's KV cache between them; divides -tp.",
            group="Parallelism",
            short="-dcp",
        ),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        Count,
        Setting(
            "Consecutive tokens that one shard keeps under -dcp; divides --block-size.", group="Parallelism"
        ),
    ] = 1
    dcp_comm_backend: Annotated[
        Literal["a2a", "ag_rs"],
        Setting(
            "How -dcp merges attention: in one exchange (a2a), or in two smaller ones (ag_rs).",
            group="Parallelism",
        ),
    ] = "a2a"

    enable_expert_parallel: Annotated[
        bool,
        Setting("Whole routed experts on each shard, instead of a part of each expert.", group="Parallelism"),
    ] = False
    threads: Annotated[
        ThreadCount,
        Setting(
            "CPU threads of each shard, in loops that are long enough for them. auto: this machine's cores, "
            "shared out among its shards; 1 on a cluster, where a shard reserves as many CPUs.",
            group="Parallelism",
        ),
    ] = 1

    speculative_config: Annotated[
        SpeculativeConfig | None,
        BeforeValidator(parse_json),
        Setting(
            'vLLM\'s spelling: {"method":"mtp","num_speculative_tokens":3}.',
            rule='JSON such as {"method":"mtp","num_speculative_tokens":3}, with 0 to 8 tokens',
            group="Speculation",
            short="-sc",
            metavar="JSON",
            shown_default="--num-speculative-tokens",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        NumDrafts | None,
        Setting(
            "Tokens that the MTP layer drafts per step; 0 switches it off.",
            group="Speculation",
            shown_default="3, or 0 without MTP weights",
        ),
    ] = None
    rejection_sampling: Annotated[
        Literal["coupled", "standard"],
        Setting(
            "How drafts are accepted at a temperature above 0. coupled: when they are the "
            "target's own token, so streams do not depend on drafts. standard: with probability min(1, p/q).",
            group="Speculation",
        ),
    ] = "coupled"

    dynamic_speculative_decoding: Annotated[
        bool,
        Setting(
            "Draft as many tokens as measurably pay, of at most --num-speculative-tokens.",
            group="Speculation",
        ),
    ] = False
    num_speculative_tokens_per_batch_size: Annotated[
        DraftTable | None,
        BeforeValidator(parse_json),
        Setting(
            "Drafts by the number of running requests, as rows [first, last, drafts], instead of "
            "by measurement.",
            group="Speculation",
        ),
    ] = None

    max_num_seqs: Annotated[
        SmallCount,
        Setting("Requests that run at the same time, at most.", group="Scheduling"),
    ] = 64
    max_num_batched_tokens: Annotated[
        Count,
        Setting(
            "Rows of one step, at most: prompt chunks, and k + 1 for each running request.",
            group="Scheduling",
        ),
    ] = 2048
    scheduling: Annotated[
        Literal["auto", "sync", "deferred"],
        Setting(
            "deferred sends a step while the one before it still runs. Same streams. auto: on a GPU.",
            group="Scheduling",
        ),
    ] = "auto"
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Setting(
            "Who is served first: who came first, or whose priority number is lowest.", group="Scheduling"
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        CountOrZero | None,
        Setting(
            "Rows of a step that one prompt gets while others wait, at most; 0: no bound.",
            group="Scheduling",
            shown_default="half of --max-num-batched-tokens",
        ),
    ] = None

    block_size: Annotated[
        SmallCount,
        Setting("Tokens of one block of the KV cache on one shard.", group="KV cache"),
    ] = 16
    num_kv_blocks: Annotated[
        Count | None,
        Setting(
            "Blocks of the KV cache on each shard, instead of a memory budget.",
            group="KV cache",
            shown_default="what --kv-cache-memory-bytes holds",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Setting("Compute the common beginning of prompts once.", group="KV cache"),
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["xxhash", "sha256"],
        Setting(
            "How common beginnings are found. xxhash is faster, but prompts can be made to collide: for one "
            "trusting tenant.",
            group="KV cache",
        ),
    ] = "sha256"
    kv_cache_memory_bytes: Annotated[
        Size | None,
        Setting(
            "Memory of the KV cache on each shard; K, M and G count in powers of 1024.",
            group="KV cache",
            shown_default="512M; on a GPU what --gpu-memory-utilization leaves",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Share,
        Setting(
            "Of a GPU's memory, what other programs hold included: what weights and steps leave of it is the "
            "KV cache's, where neither flag above sizes it.",
            group="KV cache",
        ),
    ] = 0.9
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Setting(
            "Storage of the latent KV. auto is --dtype; fp8_ds_mla is the smallest.",
            group="KV cache",
        ),
    ] = "auto"
    indexer_kv_dtype: Annotated[
        IndexerKVDtype,
        Setting(
            "Storage of the indexer keys. auto is fp8 with fp8_ds_mla, else the latent KV's.",
            group="KV cache",
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "native", "torch", "triton", "aiter"],
        Setting("What computes the model. auto is the fastest that this machine can use.", group="KV cache"),
    ] = "auto"

    deterministic: Annotated[
        bool,
        Setting(
            "The same stream in every batch, for every number of drafts, bit for bit in low precision too. "
            "By triton on a GPU, by native on a CPU.",
            group="KV cache",
        ),
    ] = False

    check_plans: Annotated[
        bool,
        Setting("Validate every attention plan of every step; slow, for debugging.", group="Observation"),
    ] = False
    trace: Annotated[
        Text | None,
        Setting(
            "File that a trace of all steps is written to at the end, for Perfetto or chrome://tracing.",
            rule="a file that can be written",
            group="Observation",
            metavar="FILE",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting(
            "What is logged at least. info: a line for each request, and statistics.",
            group="Observation",
        ),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Setting(
            "How a line of a log looks: for people, or one JSON object.",
            group="Observation",
        ),
    ] = "text"
    log_dir: Annotated[
        FilePath | None,
        Setting(
            "Folder that gets a folder of log files for each run, on every node.",
            rule="a folder",
            group="Observation",
            metavar="DIR",
            shown_default="latentray/logs in XDG_STATE_HOME or ~/.local/state",
        ),
    ] = None

    step_timeout: Annotated[
        Seconds,
        Setting("While a step runs longer, health says that nothing is served.", group="Ray"),
    ] = 10.0
    heartbeat_timeout: Annotated[
        Seconds,
        Setting(
            "A shard that is silent for so long is lost. One whose process or node is gone "
            "is found at once, by its connection.",
            group="Ray",
        ),
    ] = 60.0
    max_restarts: Annotated[
        CountOrZero,
        Setting(
            "How often lost shards or a lost coordinator are started again without a minute of "
            "service between; 0: the first loss ends the group.",
            group="Ray",
        ),
    ] = 5
    recovery_timeout: Annotated[
        Seconds,
        Setting(
            "How long their start may wait for a node, a process or the next tensor; then the group fails.",
            group="Ray",
        ),
    ] = 300.0
    placement_timeout: Annotated[
        Seconds,
        Setting(
            "How long the start waits for room in the cluster; an autoscaler may take minutes to add a node.",
            group="Ray",
        ),
    ] = 30.0
    num_spares: Annotated[
        CountOrZero,
        Setting(
            "Processes that have started and wait to take a lost one's place at once: so many for the "
            "coordinator and for the shards of each node. Each takes memory, but no CPU.",
            group="Ray",
        ),
    ] = 0
    address: Annotated[
        Text | None,
        Setting(
            "Running Ray cluster to join.",
            rule="the address of a Ray cluster, such as auto or HOST:PORT",
            group="Ray",
            metavar="RAY",
            shown_default="RAY_ADDRESS, else a local one is started and stopped",
        ),
    ] = None

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        """Both spellings hold the same number afterwards, so that readers need only one."""
        config = self.speculative_config
        if config is not None and self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", config.num_speculative_tokens)
        if config is not None and self.num_speculative_tokens_per_batch_size is None:
            table = config.num_speculative_tokens_per_batch_size
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)
        return self
