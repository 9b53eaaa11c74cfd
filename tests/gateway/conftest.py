"""Real grpc.aio servers on free loopback ports."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from actors.config import GroupConfig
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import GatewayServer
from tests.support.scripted_chat import Saying, chat_frontend
from tests.support.scripted_group import ScriptedGroup

CHECKPOINT = Path(__file__).parents[2] / "cluster" / "assets" / "tiny-dsa"
Serve = Callable[..., Awaitable[GatewayServer]]


@pytest.fixture(scope="session")
def config() -> GroupConfig:
    return GroupConfig(
        model_path=str(CHECKPOINT),
        served_model_name="tiny",
        num_speculative_tokens=3,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=16,
        num_kv_blocks=64,
        dtype="float32",
        kv_cache_dtype="float32",
    )


@pytest.fixture(scope="session")
def frontend(config: GroupConfig) -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        CHECKPOINT, served_model_name="tiny", max_model_len=config.max_model_len, seed=0
    )


@pytest.fixture
async def serve(config: GroupConfig, frontend: ModelFrontend) -> AsyncIterator[Serve]:
    """serve(group, **options) -> a started server, stopped at the test's end."""
    servers: list[GatewayServer] = []

    async def start(group: Any, **options: Any) -> GatewayServer:
        options = {"port": 0, "config": config, "frontend": frontend} | options
        server = GatewayServer(**{"groups": [group]} | options)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop(drain_s=0)


@pytest.fixture
async def stub_of() -> AsyncIterator[Callable[[GatewayServer], Any]]:
    """stub_of(server) -> the generated stub of the service, as any client would use it."""
    channels: list[grpc.aio.Channel] = []

    def connect(server: GatewayServer, **options: int) -> Any:
        channel = grpc.aio.insecure_channel(server.address, options=list(options.items()))
        channels.append(channel)
        return vllm_engine_pb2_grpc.VllmEngineStub(channel)

    yield connect
    for channel in channels:
        await channel.close()


GLM = Path(__file__).parents[1] / "unit" / "cluster" / "templates" / "glm_style.jinja"


@pytest.fixture(scope="module")
def saying() -> Saying:
    """What the model of `chat_server` says: one that thinks and calls tools as GLM does."""
    return Saying(chat_frontend(str(GLM)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_server(saying: Saying, config: GroupConfig) -> AsyncIterator[GatewayServer]:
    """One server for all tests of a file, which must run in the module's event loop."""
    group = ScriptedGroup(saying)
    server = GatewayServer(groups=[group], config=config, frontend=saying.frontend, port=0, http_port=0)
    await server.start()
    yield server
    await server.stop(drain_s=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_client(chat_server: GatewayServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{chat_server.http_port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
