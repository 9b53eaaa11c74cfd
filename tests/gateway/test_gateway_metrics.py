"""What operators see: Prometheus over HTTP, and statistics over gRPC alone."""

import asyncio
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from actors.stats import GroupStats, PhaseTimes
from cluster.cli.main import app
from cluster.client import AsyncClient
from kernels_integration.errors import ConfigError
from tests.support.scripted_group import ScriptedGroup

STATS = GroupStats(
    running=3,
    waiting=2,
    num_used_blocks=16,
    num_kv_blocks=64,
    num_generated_tokens=500,
    num_verifies=70,
    proposed=(60, 40, 30),
    accepted=(45, 20, 10),
    last_k=(1, 0, 2),
    num_cache_queries=200,
    num_cache_hits=50,
    phases=PhaseTimes(num_finished=4, queue_s=1.5),
)


async def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Samples by name and the labels beside the model's."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    return {(s.name, *(v for k, v in s.labels.items() if k != "model_name")): s.value for s in samples}


async def test_prometheus(serve) -> None:
    group = ScriptedGroup()
    group.stats = STATS
    server = await serve(group, metrics_port=0)
    async with AsyncClient(server.address) as client:
        completion = await client.generate([5, 6, 7], max_tokens=7, stream=False)
    assert len(completion.token_ids) == 7
    found = await scrape(server.metrics_port)
    assert found["vllm:num_requests_running",] == 3
    assert found["vllm:kv_cache_usage_perc",] == 0.25
    assert found["vllm:generation_tokens_total",] == 500
    assert found["vllm:prefix_cache_hits_total",] == 50
    assert found["vllm:spec_decode_num_drafts_total",] == 60
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 20
    assert found["latentray:requests_by_drafts", "2"] == 2
    assert found["latentray:request_queue_seconds_total",] == 1.5
    assert found["latentray:healthy",] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 1
    assert found["vllm:e2e_request_latency_seconds_count",] == 1
    assert found["vllm:time_to_first_token_seconds_sum",] <= found["vllm:e2e_request_latency_seconds_sum",]
    group.healthy, group.stats = False, None
    found = await scrape(server.metrics_port)
    assert found["latentray:healthy",] == 0
    assert ("vllm:num_requests_running",) not in found


async def test_a_taken_metrics_port_is_told(serve) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="--metrics-port"):
            await serve(ScriptedGroup(), metrics_port=other.getsockname()[1])


async def test_statistics_over_grpc_alone(serve) -> None:
    group = ScriptedGroup()
    server = await serve(group)
    async with AsyncClient(server.address) as client:
        group.stats = STATS
        assert (await client.loads())[0].stats == STATS
        group.stats = None
        assert (await client.loads())[0].stats is None
        group.stats = STATS
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--server", server.address])
    assert result.exit_code == 0, result.output
    assert "75%, 50%, 33%" in result.output
    assert "1 x 0, 2 x 2" in result.output
