"""Every setting of an engine, spelled as in vLLM. Flags, environment, file and keywords derive from here.

A field's description is its help text; its `Setting` holds what pydantic has no place for.
"""

import itertools
import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cluster.config.sizes import parse_size

if TYPE_CHECKING:
    from actors.config import GroupConfig

BUNDLED_CHECKPOINT = Path(__file__).resolve().parent.parent / "assets" / "tiny-dsa"
MAX_SPECULATIVE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a field is shown to people."""

    rule: str
    """What a legal value is, as the end of "it must be ..."."""
    group: str
    short: str | None = None
    """Second spelling of the flag, such as -tp."""
    metavar: str = "N"
    shown_default: str | None = None
    """Words for the default, where its value says little."""


def _whole_number(value: Any) -> Any:
    """Text and ints go on to pydantic; true and 4.0 are no counts."""
    if isinstance(value, bool | float):
        raise ValueError("not a whole number")
    return value


# Bounds stand inside, so that the JSON schema shows them.
Count = Annotated[int, Field(ge=1), BeforeValidator(_whole_number)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_whole_number)]
NumDrafts = Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS), BeforeValidator(_whole_number)]
Seed = Annotated[int, Field(ge=0, lt=2**64), BeforeValidator(_whole_number)]
Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(_whole_number)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(parse_size)]
_AT_LEAST_ONE = "a whole number >= 1"
_DTYPES = "auto, float32, float64 or bfloat16"
KVCacheDtype = Literal["auto", "float32", "float64", "bfloat16", "fp8_ds_mla"]
IndexerKVDtype = Literal["auto", "float32", "float64", "bfloat16", "fp8"]


def _parse_json(value: Any) -> Any:
    """A flag or a variable holds JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _ascending(table: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """vLLM's rules: ranges in any order, not overlapping, the first from 1; gaps take the row before."""
    rows = tuple(sorted(table))
    if any(first > last for first, last, _ in rows) or not rows or rows[0][0] != 1:
        raise ValueError("not ranges from 1")
    if any(row[1] >= following[0] for row, following in itertools.pairwise(rows)):
        raise ValueError("overlapping ranges")
    return rows


DraftTable = Annotated[tuple[tuple[Count, Count, NumDrafts], ...], AfterValidator(_ascending)]
_DRAFT_TABLE_RULE = (
    "JSON rows of first and last number of requests and drafts, such as [[1,8,3],[9,64,1],[65,512,0]]: "
    "from 1, not overlapping"
)


class SpeculativeConfig(BaseModel):
    """The value of --speculative-config, vLLM's spelling of --num-speculative-tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: NumDrafts
    num_speculative_tokens_per_batch_size: DraftTable | None = None


class EngineArgs(BaseModel):
    """Settings of one engine: a group, and how it is placed. None means: derived by `resolve`.

    Values come as text (flags, environment) or typed (file, keywords); both are parsed here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[
        str,
        BeforeValidator(lambda value: str(value) if isinstance(value, PathLike) else value),
        Field(
            min_length=1,
            description="Directory of the checkpoint: config.json, tokenizer.json, *.safetensors.",
        ),
        Setting(
            rule="the directory of a checkpoint",
            group="Model",
            metavar="PATH",
            shown_default=f"the bundled {BUNDLED_CHECKPOINT.name}",
        ),
    ] = str(BUNDLED_CHECKPOINT)
    served_model_name: Annotated[
        str | None,
        Field(min_length=1, description="Name that clients ask for."),
        Setting(rule="a name", group="Model", metavar="NAME", shown_default="the value of --model"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16"],
        Field(description="Computation. auto is float32 on a CPU."),
        Setting(rule=_DTYPES, group="Model", metavar="{auto,float32,float64,bfloat16}"),
    ] = "auto"
    max_model_len: Annotated[
        Count | None,
        Field(description="Tokens of prompt and completion together, at most."),
        Setting(
            rule=_AT_LEAST_ONE,
            group="Model",
            shown_default="the checkpoint's, as far as the KV cache holds it",
        ),
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "hf", "deepseek_v32"],
        Field(
            description="How chats become text. hf: by the chat template. deepseek_v32: by DeepSeek-V3.2's "
            "encoding. auto: by that where a deepseek_v32 checkpoint has no template."
        ),
        Setting(rule="auto, hf or deepseek_v32", group="Model", metavar="{auto,hf,deepseek_v32}"),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        BeforeValidator(lambda value: str(value) if isinstance(value, PathLike) else value),
        Field(min_length=1, description="File of a Jinja template for chats."),
        Setting(
            rule="a file that holds a Jinja template",
            group="Model",
            metavar="FILE",
            shown_default="the checkpoint's",
        ),
    ] = None
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Field(
            description="Sampling parameters that requests leave open. auto: those of the checkpoint's "
            "generation_config.json. vllm: neutral ones."
        ),
        Setting(rule="auto or vllm", group="Model", metavar="{auto,vllm}"),
    ] = "auto"
    max_logprobs: Annotated[
        int,
        Field(ge=-1, description="Alternatives that a request may ask for; -1: the whole vocabulary."),
        BeforeValidator(_whole_number),
        Setting(rule="a whole number >= 0, or -1", group="Model"),
    ] = 20
    seed: Annotated[
        Seed,
        Field(description="Requests without a seed of their own draw theirs from it."),
        Setting(rule="a whole number from 0 to 2**64 - 1", group="Model"),
    ] = 0

    tensor_parallel_size: Annotated[
        Count,
        Field(description="Shards of the group."),
        Setting(rule=_AT_LEAST_ONE, group="Parallelism", short="-tp"),
    ] = 1
    decode_context_parallel_size: Annotated[
        Count,
        Field(description="Shards that divide a sequence's KV cache between them; divides -tp."),
        Setting(rule=_AT_LEAST_ONE, group="Parallelism", short="-dcp"),
    ] = 1
    cp_kv_cache_interleave_size: Annotated[
        Count,
        Field(description="Consecutive tokens that one shard keeps under -dcp; divides --block-size."),
        Setting(rule=_AT_LEAST_ONE, group="Parallelism"),
    ] = 1

    enable_expert_parallel: Annotated[
        bool,
        Field(description="Whole routed experts on each shard, instead of a part of each expert."),
        Setting(rule="true or false", group="Parallelism"),
    ] = False

    speculative_config: Annotated[
        SpeculativeConfig | None,
        BeforeValidator(_parse_json),
        Field(description='vLLM\'s spelling: {"method":"mtp","num_speculative_tokens":3}.'),
        Setting(
            rule='JSON such as {"method":"mtp","num_speculative_tokens":3}, with 0 to 8 tokens',
            group="Speculation",
            short="-sc",
            metavar="JSON",
            shown_default="--num-speculative-tokens",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        NumDrafts | None,
        Field(description="Tokens that the MTP layer drafts per step; 0 switches it off."),
        Setting(
            rule=f"a whole number from 0 to {MAX_SPECULATIVE_TOKENS}",
            group="Speculation",
            shown_default="3, or 0 without MTP weights",
        ),
    ] = None
    rejection_sampling: Annotated[
        Literal["coupled", "standard"],
        Field(
            description="How drafts are accepted at a temperature above 0. coupled: when they are the "
            "target's own token, so streams do not depend on drafts. standard: with probability min(1, p/q)."
        ),
        Setting(rule="coupled or standard", group="Speculation", metavar="{coupled,standard}"),
    ] = "coupled"

    dynamic_speculative_decoding: Annotated[
        bool,
        Field(description="Draft as many tokens as measurably pay, of at most --num-speculative-tokens."),
        Setting(rule="true or false", group="Speculation"),
    ] = False
    num_speculative_tokens_per_batch_size: Annotated[
        DraftTable | None,
        BeforeValidator(_parse_json),
        Field(
            description="Drafts by the number of running requests, as rows [first, last, drafts], instead of "
            "by measurement."
        ),
        Setting(rule=_DRAFT_TABLE_RULE, group="Speculation", metavar="JSON", shown_default="none"),
    ] = None

    max_num_seqs: Annotated[
        Count,
        Field(description="Requests that run at the same time, at most."),
        Setting(rule=_AT_LEAST_ONE, group="Scheduling"),
    ] = 64
    max_num_batched_tokens: Annotated[
        Count,
        Field(description="Rows of one step, at most: prompt chunks, and k + 1 for each running request."),
        Setting(rule=_AT_LEAST_ONE, group="Scheduling"),
    ] = 2048
    scheduling: Annotated[
        Literal["sync", "deferred"],
        Field(description="deferred sends a step while the one before it still runs. Same streams."),
        Setting(rule="sync or deferred", group="Scheduling", metavar="{sync,deferred}"),
    ] = "sync"
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Field(description="Who is served first: who came first, or whose priority number is lowest."),
        Setting(rule="fcfs or priority", group="Scheduling", metavar="{fcfs,priority}"),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        CountOrZero | None,
        Field(description="Rows of a step that one prompt gets while others wait, at most; 0: no bound."),
        Setting(
            rule="a whole number >= 0",
            group="Scheduling",
            shown_default="half of --max-num-batched-tokens",
        ),
    ] = None

    block_size: Annotated[
        Count,
        Field(description="Tokens of one block of the KV cache on one shard."),
        Setting(rule=_AT_LEAST_ONE, group="KV cache"),
    ] = 16
    num_kv_blocks: Annotated[
        Count | None,
        Field(description="Blocks of the KV cache on each shard, instead of a memory budget."),
        Setting(rule=_AT_LEAST_ONE, group="KV cache", shown_default="what --kv-cache-memory-bytes holds"),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Field(description="Compute the common beginning of prompts once."),
        Setting(rule="true or false", group="KV cache"),
    ] = True
    prefix_caching_hash_algo: Annotated[
        Literal["xxhash", "sha256"],
        Field(description="How common beginnings are found. sha256 resists prompts made to collide."),
        Setting(rule="xxhash or sha256", group="KV cache", metavar="{xxhash,sha256}"),
    ] = "xxhash"
    kv_cache_memory_bytes: Annotated[
        Size | None,
        Field(description="Memory of the KV cache on each shard; K, M and G count in powers of 1024."),
        Setting(
            rule="a size of at least one byte, such as 512M or 2G",
            group="KV cache",
            metavar="SIZE",
            shown_default="512M",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Field(description="Storage of the latent KV. auto is --dtype; fp8_ds_mla is the smallest."),
        Setting(
            rule="auto, float32, float64, bfloat16 or fp8_ds_mla",
            group="KV cache",
            metavar="{auto,float32,float64,bfloat16,fp8_ds_mla}",
        ),
    ] = "auto"
    indexer_kv_dtype: Annotated[
        IndexerKVDtype,
        Field(description="Storage of the indexer keys. auto is fp8 with fp8_ds_mla, else the latent KV's."),
        Setting(
            rule="auto, float32, float64, bfloat16 or fp8",
            group="KV cache",
            metavar="{auto,float32,float64,bfloat16,fp8}",
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "aiter"],
        Field(description="What computes the model. auto is the fastest that this machine can use."),
        Setting(rule="auto, torch, triton or aiter", group="KV cache", metavar="{auto,torch,triton,aiter}"),
    ] = "auto"

    check_plans: Annotated[
        bool,
        Field(description="Validate every attention plan of every step; slow, for debugging."),
        Setting(rule="true or false", group="Observation"),
    ] = False
    trace: Annotated[
        str | None,
        Field(
            min_length=1,
            description="File that a trace of all steps is written to at the end, for Perfetto "
            "or chrome://tracing.",
        ),
        Setting(rule="a file that can be written", group="Observation", metavar="FILE", shown_default="none"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="What is logged at least. info: a line for each request, and statistics."),
        Setting(
            rule="debug, info, warning or error",
            group="Observation",
            metavar="{debug,info,warning,error}",
        ),
    ] = "info"
    log_dir: Annotated[
        str | None,
        BeforeValidator(lambda value: str(value) if isinstance(value, PathLike) else value),
        Field(
            min_length=1, description="Folder that gets a folder of log files for each run, on every node."
        ),
        Setting(
            rule="a folder",
            group="Observation",
            metavar="DIR",
            shown_default="latentray/logs in XDG_STATE_HOME or ~/.local/state",
        ),
    ] = None

    step_timeout: Annotated[
        Seconds,
        Field(description="While a step runs longer, health says that nothing is served."),
        Setting(rule="a number of seconds above 0", group="Ray", metavar="SECONDS"),
    ] = 10.0
    heartbeat_timeout: Annotated[
        Seconds,
        Field(
            description="A shard that is silent for so long is lost. One whose process or node is gone "
            "is found at once, by its connection."
        ),
        Setting(rule="a number of seconds above 0", group="Ray", metavar="SECONDS"),
    ] = 60.0
    address: Annotated[
        str | None,
        Field(min_length=1, description="Running Ray cluster to join."),
        Setting(
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

    def resolve(self) -> "GroupConfig":
        """The final, legal values, read with the checkpoint's config.

        Errors: ConfigError, CheckpointError: value, rule, legal values, fix.
        """
        from cluster.config.resolve import resolve

        return resolve(self)


class ServeArgs(EngineArgs):
    """Settings of `latentray serve`: an engine and its gateway."""

    host: Annotated[
        str,
        Field(min_length=1, description="Address to listen on; 0.0.0.0 serves other machines too."),
        Setting(rule="an address of this machine", group="Server", metavar="HOST"),
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        Field(description="Port of the gRPC server; 0 takes a free one."),
        Setting(rule="a whole number from 0 to 65535", group="Server", metavar="PORT"),
    ] = 50051
    metrics_port: Annotated[
        Port | None,
        Field(description="Port of Prometheus metrics over HTTP, at /metrics; 0 takes a free one."),
        Setting(rule="a whole number from 0 to 65535", group="Server", metavar="PORT", shown_default="none"),
    ] = None
    max_message_size: Annotated[
        Size,
        Field(description="Bytes of one gRPC message, at most, in both directions."),
        Setting(rule="a size of at least one byte, such as 16M", group="Server", metavar="SIZE"),
    ] = 16 * 2**20
