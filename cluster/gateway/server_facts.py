"""What GetModelInfo and GetServerInfo say: facts that do not change while a server lives."""

import json
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from cluster.frontend.front_end import ModelFrontend

SERVER_TYPE = "vllm-grpc"
"""Routers recognise the protocol by it."""


def model_info(config: GroupConfig, frontend: ModelFrontend) -> pb.GetModelInfoResponse:
    model = _read_json(Path(config.model_path) / "config.json")
    return pb.GetModelInfoResponse(
        model_path=config.model_path,
        is_generation=True,
        max_context_length=config.max_model_len,
        vocab_size=model["vocab_size"],
        supports_vision=False,
        served_model_name=config.served_model_name,
        tokenizer_path=config.model_path,
        model_type=model["model_type"],
        architectures=model.get("architectures") or [],
        eos_token_ids=frontend.eos_token_ids,
        pad_token_id=_token_id(model.get("pad_token_id")),
        bos_token_id=_token_id(model.get("bos_token_id")),
        max_req_input_len=config.max_model_len - 1,
        default_sampling_params_json=json.dumps(frontend.default_sampling_params, separators=(",", ":")),
    )


def server_info(config: GroupConfig) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        attention_backend=config.attention_backend,
        model_dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
    )


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _token_id(value: int | list[int] | None) -> int:
    """The proto holds one id and has no "none"; vLLM's server says 0 then."""
    return (value[0] if isinstance(value, list) else value) or 0
