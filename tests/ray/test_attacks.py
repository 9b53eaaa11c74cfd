"""A server that runs: where it listens, and what its own ports answer who has no key."""

import ipaddress
import os
import ssl
from collections.abc import Iterator

import aiohttp
import grpc
import pytest

from cluster.client import AsyncClient
from cluster.config import ServeArgs
from cluster.launch.serving import RunningServer, start_server
from kernels_integration.errors import InvalidApiKeyError
from tests.support.listening import Listener, descendants, listeners, name_of
from tests.unit.access.test_api_keys import TWO_TENANTS, write

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = write(tmp_path_factory.mktemp("access") / "keys", TWO_TENANTS)
    args = ServeArgs(
        tensor_parallel_size=2,
        port=0,
        http_port=0,
        metrics_port=0,
        api_keys=keys,
        dtype="float64",
        max_model_len=512,
        num_kv_blocks=96,
        max_restarts=0,  # whose shard is lost is lost
    )
    with start_server(args) as server:
        yield server


def opened() -> set[Listener]:
    """The server's, and those of its local Ray: all come from this process."""
    ours = descendants(os.getpid()) - {os.getpid()}
    return {listener for listener in listeners() if listener.pid in ours}


def test_nothing_listens_for_other_machines(server: RunningServer) -> None:
    found = opened()
    names = {pid: name for name, pid in server.process_ids().items()}
    assert {names.get(listener.pid) for listener in found} >= {"gateway", "coordinator"}
    public = [x for x in found if not ipaddress.ip_address(x.host).is_loopback]
    assert [(x, name_of(x.pid)) for x in public] == []


async def test_the_servers_own_ports_refuse_who_has_no_key(server: RunningServer) -> None:
    async with AsyncClient(server.address, decode=False) as client:
        with pytest.raises(InvalidApiKeyError):
            await client.generate([1], stream=False)
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/models", "/metrics", "/status.json"):
            async with session.get(f"http://127.0.0.1:{server.http_port}{path}") as answer:
                assert answer.status == 401
        context = ssl.create_default_context()
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://127.0.0.1:{server.http_port}/health", ssl=context)
    # 200 MB, which nobody reads before he knows who sends them
    async with grpc.aio.insecure_channel(
        server.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary("/vllm.grpc.engine.VllmEngine/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(bytes(200 * 2**20), timeout=60)
        assert error.value.code() in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
