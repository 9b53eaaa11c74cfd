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
_PROMPTS = "use --long-prefill-token-threshold, which lets several prompts share a step"
_DRAFTS = "use --num-speculative-tokens"
_GROUPS = "use --num-groups; the server spreads requests over them by itself"
_LAYERS = "layers are not spread over stages; spread each one by --tensor-parallel-size"
_DOWNLOAD = "nothing is downloaded; download the model first and pass its directory as --model"
_NODES = "nodes are Ray's: start Ray on each, and pass the head's address as --address"
_GRAPHS = "steps are recorded as graphs where that pays, with equal results; leave it out"
_ACCESS = "each request has one line without its texts; hide them with --log-level warning"
_GRAMMARS = "structured outputs are built in, one implementation for all; leave it out"
_IN_CHECKPOINT = "it is read from the checkpoint; leave it out"
_NO_ADAPTERS = "adapters are not served; merge them into the checkpoint first"
_TEXT_ALONE = "models here read text alone; leave it out"
_ONE_ROLE = "prefill and decode share a group's steps; leave it out"
_NO_TIERS = "KV lives where it is computed, in no other tier; size it by --kv-cache-memory-bytes"
_NO_BALANCING = "experts stay where they were loaded, evenly over the -tp shards; leave it out"
_CHOSEN = "it is chosen for the device; leave it out, or choose all of its kind by --attention-backend"
_MTP = "drafts come from the checkpoint's own MTP layers; use --num-speculative-tokens"
_NOT_PRUNED = "nothing that a request asks for is switched off by a flag; leave it out"
_BROWSERS = "pages of other sites are not answered; put a proxy in front that allows them"
_TIMES = "use --step-timeout"
_NO_CODE = (
    "nothing in a checkpoint is executed. Models are built in, weights are read from safetensors alone, and "
    "auto_map in config.json is ignored; leave it out"
)

OTHER_ENGINES = {
    "tp": _TP,
    "tp_size": _TP,
    "tensor_parallel": _TP,
    "dcp": _DCP,
    "dcp_size": _DCP,
    "dcp_kv_cache_interleave_size": "use --cp-kv-cache-interleave-size",
    "ep": _EP,
    "ep_size": _EP,
    "dp": _GROUPS,
    "dp_size": _GROUPS,
    "load_balance_method": "requests go to the group that has their prefix or the least work; leave it out",
    "pp": _LAYERS,
    "pp_size": _LAYERS,
    "pipeline_parallel_size": _LAYERS,
    "pcp": "prompts are cut into chunks, not over ranks; use --max-num-batched-tokens",
    "prefill_context_parallel_size": "prompts are cut into chunks, not over ranks; use "
    "--max-num-batched-tokens",
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "dist_init_addr": _NODES,
    "nccl_port": _NODES,
    "headless": _NODES,
    "base_gpu_id": "Ray hands out the GPUs; hide some by CUDA_VISIBLE_DEVICES before Ray starts",
    "gpu_id_step": "Ray hands out the GPUs; hide some by CUDA_VISIBLE_DEVICES before Ray starts",
    "dist_timeout": _TIMES,
    "watchdog_timeout": _TIMES,
    "distributed_executor_backend": "groups run on Ray; generate and batch also take --executor inline",
    "model_path": _MODEL,
    "tokenizer": _MODEL,
    "tokenizer_path": _MODEL,
    "hf_config_path": _MODEL,
    "tokenizer_revision": _DOWNLOAD,
    "code_revision": _DOWNLOAD,
    "download_dir": _DOWNLOAD,
    "revision": _DOWNLOAD,
    "hf_token": _DOWNLOAD,
    "trust_remote_code": _NO_CODE,
    "model_impl": _NO_CODE,
    "logits_processors": _NO_CODE,
    "logits_processor_pattern": _NO_CODE,
    "enable_custom_logit_processor": _NO_CODE,
    "tool_parser_plugin": "parsers are built in; choose one by --tool-call-parser",
    "reasoning_parser_plugin": "parsers are built in; choose one by --reasoning-parser",
    "quantization": _IN_CHECKPOINT,
    "q": _IN_CHECKPOINT,
    "rope_scaling": "it is read from config.json; leave it out, or change it there",
    "rope_theta": "it is read from config.json; leave it out, or change it there",
    "hf_overrides": "config.json is used as it is; change it there",
    "json_model_override_args": "config.json is used as it is; change it there",
    "override_generation_config": "use --generation-config, a file or none, or state values in each request",
    "preferred_sampling_params": "use --generation-config, a file or none, or state values in each request",
    "sampling_defaults": "use --generation-config",
    "skip_tokenizer_init": "prompts of token ids are taken beside texts; leave it out",
    "context_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "allow_auto_truncate": "a prompt that is too long is refused, never cut; use --max-model-len",
    "max_running_requests": _REQUESTS,
    "max_batch_size": _REQUESTS,
    "max_num_partial_prefills": _PROMPTS,
    "max_long_partial_prefills": _PROMPTS,
    "chunked_prefill_size": _ROWS,
    "enable_chunked_prefill": _ROWS,
    "enable_mixed_chunk": _ROWS,
    "max_prefill_tokens": _ROWS,
    "max_num_tokens": _ROWS,
    "page_size": "use --block-size",
    "num_gpu_blocks_override": "use --num-kv-blocks",
    "max_total_tokens": "use --num-kv-blocks, times --block-size",
    "mem_fraction_static": "use --gpu-memory-utilization on a GPU, --kv-cache-memory-bytes on a CPU",
    "calculate_kv_scales": "FP8 caches scale each row by itself; leave it out",
    "quantization_param_path": "FP8 caches scale each row by itself; leave it out",
    "speculative_num_steps": _DRAFTS,
    "speculative_num_draft_tokens": _DRAFTS,
    "speculative_algorithm": _MTP,
    "speculative_algo": _MTP,
    "speculative_model": _MTP,
    "speculative_draft_model_path": _MTP,
    "speculative_eagle_topk": "a draft is one chain of tokens; use --num-speculative-tokens for its length",
    "disable_radix_cache": "use --no-enable-prefix-caching",
    "no_enable_chunked_prefill": _ROWS,
    "async_scheduling": "use --scheduling deferred, which is the default on a GPU",
    "disable_overlap_schedule": "use --scheduling sync",
    "schedule_policy": "use --scheduling-policy",
    "enable_priority_scheduling": "use --scheduling-policy priority",
    "random_seed": "use --seed",
    "enable_metrics": "use --metrics-port",
    "disable_log_stats": "a line every 10 s tells of the groups that work; hide it with --log-level warning",
    "log_level_http": "use --log-level",
    "uvicorn_log_level": "use --log-level",
    "log_config_file": "use --log-level, --log-format and --log-dir",
    "show_time_cost": "use --trace",
    "otlp_traces_endpoint": "use --trace, a file that Perfetto and chrome://tracing read",
    "api_key": "use --api-keys, a file of keys with their tenants",
    "ssl_certfile": "use --tls-cert",
    "ssl_keyfile": "use --tls-key",
    "ssl_ca_certs": "use --tls-client-ca, which makes clients show certificates",
    "api_server_count": "one gateway answers for all groups; leave it out",
    "chat_template_content_format": "contents are texts or lists of text parts, both taken; leave it out",
    "enable_cache_report": "answers tell cached tokens of themselves; leave it out",
    "enable_prompt_tokens_details": "answers tell cached tokens of themselves; leave it out",
    "enable_auto_tool_choice": "tools may be called wherever a request gives some; leave it out",
    "enable_return_hidden_states": "hidden states are not handed out; leave it out",
    "is_embedding": "only text is generated; leave it out",
    "embedding": "only text is generated; leave it out",
    "task": "only text is generated; leave it out",
    "runner": "only text is generated; leave it out",
    "convert": "only text is generated; leave it out",
    "swap_space": "preempted requests are computed again, nothing is swapped; leave it out",
    "preemption_mode": "preempted requests are computed again, nothing is swapped; leave it out",
    "cpu_offload_gb": "weights stay where they compute; spread them by --tensor-parallel-size",
    "enforce_eager": _GRAPHS,
    "compilation_config": _GRAPHS,
    "optimization_level": _GRAPHS,
    "max_seq_len_to_capture": _GRAPHS,
    "enable_deterministic_inference": "a seeded stream is the same in every batch as it is; leave it out",
    "structured_outputs_config": _GRAMMARS,
    "guided_decoding_backend": _GRAMMARS,
    "grammar_backend": _GRAMMARS,
    "max_log_len": _ACCESS,
    "uds": "the server listens on TCP; use --host and --port",
    "root_path": "paths are served as they are; let the proxy in front cut its prefix",
    "skip_server_warmup": "the server is ready once its port is open; leave it out",
    "warmups": "the server is ready once its port is open; leave it out",
}
"""Name with underscores -> what to do. None of them is a setting or a flag here."""

_FAMILIES = (
    (r"data_parallel_.+|dp[a-z]|enable_dp_.+", _GROUPS),
    (r"(disable|enable)_log_(requests|outputs)|log_requests.*|disable_uvicorn_access_log", _ACCESS),
    (r".*lora.*", _NO_ADAPTERS),
    (
        r"(limit_|.*_)?mm_.*|.*multimodal.*|interleave_mm_strings|media_.+|allowed_(local_)?media_.+",
        _TEXT_ALONE,
    ),
    (r"disaggregation_.+|(kv|ec)_transfer_config|pdlb_url", _ONE_ROLE),
    (r"(enable_)?(hierarchical_cache|hicache.*)|kv_offloading_.+|enable_lmcache", _NO_TIERS),
    (r".*eplb.*|.*redundant_experts|expert_placement_strategy|init_expert_location", _NO_BALANCING),
    (r".*cuda_?graph.*|.*torch_compile.*", _GRAPHS),
    (
        r"((prefill|decode|mm)_attention|sampling|moe_.+|all2all|fp8_gemm.*|[dn]sa_.+)_backend|deepep_mode",
        _CHOSEN,
    ),
    (r"(enable|disable)_(nccl|flashinfer|mscclpp|symm|custom_all_reduce|dbo|two_batch)\w*", _CHOSEN),
    (
        r"disable_(shared_experts_fusion|chunked_prefix_cache|cascade_attn|sliding_window)",
        _NOT_PRUNED,
    ),
    (r"allow_credentials|allowed_(origins|methods|headers)", _BROWSERS),
)
"""Families of such names: a pattern of the whole name -> what to do."""


def foreign_words(name: str) -> str | None:
    """What to do instead of a setting of another engine (with underscores); None: none is known."""
    if name in OTHER_ENGINES:
        return OTHER_ENGINES[name]
    return next((words for pattern, words in _FAMILIES if re.fullmatch(pattern, name)), None)


def refuse_foreign(name: str, *, as_keyword: bool = False) -> None:
    """Errors: ConfigError that says what to do instead of a name of another engine.

    as_keyword: spell settings as Python's keywords.
    """
    words = foreign_words(name)
    if words is not None:
        raise ConfigError(f"there is no {name}: {_in_python(words) if as_keyword else words}")


def _in_python(words: str) -> str:
    words = re.sub(r" or -\w+", "", words)
    words = re.sub(r"--no-([a-z-]+)", r"--\1=False", words)
    return re.sub(r"--([a-z-]+)", lambda match: match[1].replace("-", "_"), words)
