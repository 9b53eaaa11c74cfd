"""What a group is started with: plain, frozen, picklable data. `cluster.config` validates and fills it."""

from dataclasses import dataclass
from typing import Literal

from kernels_integration.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One group: a coordinator and `tensor_parallel_size` shards. Every value is final and legal."""

    model_path: str
    served_model_name: str
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_comm_backend: Literal["a2a", "ag_rs"] = "a2a"
    """How the ranks of a DCP group merge their attention."""
    enable_expert_parallel: bool = False
    """Whole routed experts on each shard, instead of a part of each expert."""
    num_speculative_tokens: int = 0
    dynamic_speculative_decoding: bool = False
    """Propose as many drafts as pay, of at most num_speculative_tokens."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    """Rows (first, last, k) by the number of running requests; instead of choosing by measurement."""
    num_mtp_modules: int = 1
    """MTP layers that draft, at least 1. As many rows before the end of a prefix hit are computed again."""
    vocab_size: int = 2**31
    """Every token id that a request brings is below it."""
    max_model_len: int
    """Tokens of prompt and completion together, at most."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Rows of one step, at most."""
    block_size: int
    """Tokens of one KV block on one DCP rank; a block-table entry covers block_size * dcp tokens."""
    num_kv_blocks: int
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights in the config's shapes; no weights are read."""
    dtype: str
    """Computation: float32, float64 or bfloat16."""
    kv_cache_dtype: str
    """Storage of the latent KV: the same names, or fp8_ds_mla."""
    indexer_kv_dtype: str | None = None
    """Storage of the indexer keys: as dtype, or fp8. None: as the latent KV, and fp8 beside fp8_ds_mla."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the shards compute on."""
    num_threads: int = 1
    """CPU threads of each shard."""
    attention_backend: str = "torch"
    """auto, or one of the registry's."""
    deterministic: bool = False
    """A request's stream has the same bits in every batch, in low precision too."""
    rejection_sampling: Literal["coupled", "standard"] = "coupled"
    """How drafts are accepted at a temperature above 0. Coupled streams do not depend on k."""
    scheduling: Literal["sync", "deferred"] = "sync"
    """deferred: a step is sent while the one before it still runs."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    """Rows that one prompt gets of a step while others wait, at most; 0: no such bound."""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["xxhash", "sha256"] = "sha256"
    """xxhash can be made to collide by who chooses the tokens: one tenant's KV would serve another."""
    tokenizer_mode: Literal["auto", "hf", "deepseek_v32"] = "auto"
    chat_template: str | None = None
    """File of the chat template that is used instead of the checkpoint's."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """auto: requests that leave a parameter open get the checkpoint's. vllm: SamplingParams' own."""
    tool_call_parser: Literal[
        "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "glm47"
    ] = "auto"
    """How the model calls tools; auto: as its chat template writes it."""
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "deepseek_v3", "glm45"] = "auto"
    """Whether thoughts are told from answers; auto: where the chat template does."""
    max_logprobs: int = 20
    """Alternatives that a request may ask for beside each token; -1: the whole vocabulary."""
    seed: int = 0
    heartbeat_timeout_s: float = 60.0
    """A shard that is connected and silent for so long is lost all the same."""
    step_timeout_s: float = 10.0
    """While a step runs longer the group is not healthy."""
    max_restarts: int = 5
    """How often shards or the coordinator are started again without a minute of service between."""
    placement_timeout_s: float = 30.0
    """How long the start waits for room in a cluster."""
    recovery_timeout_s: float = 300.0
    """How long the start of new ones may wait for a node, a process or the next tensor."""
    num_spares: int = 0
    """Processes that wait to take a lost one's place: so many shards on each node, and coordinators."""
    check_plans: bool = False
    """Validate every plan of every pass: for debugging."""
    trace: bool = False
    """Record where the time of steps goes, on the coordinator and on every shard."""
    profile: bool = False
    """Record every operation of the backend too, with its work; needs trace."""
    log_level: str = "info"
    log_format: str = "text"
    log_dir: str | None = None
    """Of the processes' log files; None: the state folder of each node's user (actors.logs)."""

    @property
    def topology(self) -> Topology:
        return Topology(
            tp=self.tensor_parallel_size,
            dcp=self.decode_context_parallel_size,
            interleave=self.cp_kv_cache_interleave_size,
            expert_parallel=self.enable_expert_parallel,
        )

    @property
    def tokens_per_block(self) -> int:
        """Global tokens that one block-table entry covers (B' in the contracts)."""
        return self.topology.tokens_per_block(self.block_size)
