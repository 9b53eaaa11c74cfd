"""What GetModelInfo and GetServerInfo say: facts that do not change while a server lives."""

import json

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from cluster.frontend.front_end import ModelFrontend
from cluster.tokenizer.files import CONFIG

SERVER_TYPE = "vllm-grpc"
"""Routers recognise the protocol by it."""


def model_info(config: GroupConfig, frontend: ModelFrontend) -> pb.GetModelInfoResponse:
    model = frontend.tokenizer.files.object(CONFIG)
    return pb.GetModelInfoResponse(
        model_path=config.model_path,
        is_generation=True,
        max_context_length=config.max_model_len,
        vocab_size=frontend.vocab_size,
        supports_vision=False,
        served_model_name=config.served_model_name,
        tokenizer_path=config.model_path,
        model_type=str(model.get("model_type", "")),
        architectures=_texts(model.get("architectures")),
        eos_token_ids=frontend.eos_token_ids,
        pad_token_id=_token_id(model.get("pad_token_id")),
        bos_token_id=_token_id(model.get("bos_token_id")),
        max_req_input_len=config.max_model_len - 1,
        default_sampling_params_json=json.dumps(frontend.default_sampling_params, separators=(",", ":")),
    )


def server_info(config: GroupConfig, num_groups: int) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(
        server_type=SERVER_TYPE,
        data_parallel_size=num_groups,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        attention_backend=config.attention_backend,
        model_dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
        constrained_decoding_start="first_token",
    )


def _texts(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _token_id(value: object) -> int:
    """The proto holds one id and has no "none"; vLLM's server says 0 then."""
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, int) or isinstance(first, bool):
        return 0
    return first if 0 <= first < 2**31 else 0
