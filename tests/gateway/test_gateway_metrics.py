"""What operators see: Prometheus over HTTP, the access log, and statistics over gRPC alone."""

import asyncio
import logging
import math
import socket
import threading
import urllib.request

import aiohttp
import grpc
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from typer.testing import CliRunner

from actors.sampling_params import MAX_VOCABULARY
from actors.stats import GroupStats, PhaseTimes
from cluster.cli.app import app
from cluster.client import AsyncClient
from cluster.gateway import stats_log
from kernels_integration.errors import ConfigError, OverloadedError
from tests.support.scripted_group import ScriptedGroup, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
STATS = GroupStats(
    running=3,
    waiting=2,
    num_used_blocks=16,
    num_kv_blocks=64,
    num_generated_tokens=500,
    step_age_s=12.5,
    num_dropped_messages=4,
    num_verifies=70,
    proposed=(60, 40, 30),
    accepted=(45, 20, 10),
    last_k=(1, 0, 2),
    num_cache_queries=200,
    num_cache_hits=50,
    phases=PhaseTimes(num_finished=4, queue_s=1.5, prefill_s=2.5, decode_s=3.5),
)
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
LEGACY_NAMES = (
    "application/openmetrics-text;version=1.0.0;escaping=underscores,text/plain;version=0.0.4;q=0.5"
)

# The names in the queries of vLLM's published dashboard (its prometheus_grafana example), as of 2025 with
# the two that were renamed since, and as of today.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_per_output_token_seconds_count",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
}


async def fetch(port: int, accept: str = "", path: str = "/metrics") -> tuple[str, str]:
    """Content type and text."""

    def get() -> tuple[str, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.headers["Content-Type"], str(answer.read().decode())

    return await asyncio.to_thread(get)


async def scrape(port: int, accept: str = "") -> dict[tuple[str, ...], float]:
    """Samples by name and the labels beside the model's and the group's, which is the first."""
    content_type, text = await fetch(port, accept)
    families: list[Metric] = list(
        parse_openmetrics(text) if content_type.startswith("application/openmetrics") else parse_text(text)
    )
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    assert all(sample.labels.get("engine", "0") == "0" for sample in samples)
    common = ("model_name", "engine")
    return {(s.name, *(v for k, v in s.labels.items() if k not in common)): s.value for s in samples}


async def test_prometheus(serve) -> None:
    group = ScriptedGroup()
    group.stats = STATS
    server = await serve(group, metrics_port=0)
    async with AsyncClient(server.address) as client:
        completion = await client.generate([5, 6, 7], max_tokens=7, stream=False)
    assert len(completion.token_ids) == 7
    found = await scrape(server.metrics_port)
    assert found["vllm:num_requests_running",] == 3
    assert found["vllm:kv_cache_usage_perc",] == found["vllm:gpu_cache_usage_perc",] == 0.25
    assert found["vllm:generation_tokens_total",] == 500
    assert found["vllm:prefix_cache_hits_total",] == 50
    assert found["vllm:spec_decode_num_drafts_total",] == 60
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 20
    assert found["latentray:requests_by_drafts", "2"] == 2
    assert found["latentray:healthy",] == 1
    assert found["latentray:step_age_seconds",] == 12.5
    assert found["latentray:dropped_messages_total",] == 4
    for phase, seconds in (("queue", 1.5), ("prefill", 2.5), ("decode", 3.5)):
        assert found[f"vllm:request_{phase}_time_seconds_sum",] == seconds
        assert found[f"vllm:request_{phase}_time_seconds_count",] == 1
    assert found["vllm:request_queue_time_seconds_bucket", "1.0"] == 0
    assert found["vllm:request_queue_time_seconds_bucket", "2.5"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 1
    assert found["vllm:e2e_request_latency_seconds_count",] == 1
    assert found["vllm:time_to_first_token_seconds_sum",] <= found["vllm:e2e_request_latency_seconds_sum",]
    for name in ("inter_token_latency", "time_per_output_token"):  # three updates: 3 + 3 + 1 tokens
        assert found[f"vllm:{name}_seconds_count",] == 2
    assert found["vllm:request_prompt_tokens_sum",] == 3
    assert found["vllm:request_generation_tokens_bucket", "5.0"] == 0
    assert found["vllm:request_generation_tokens_bucket", "10.0"] == 1
    assert found["vllm:request_max_num_generation_tokens_sum",] == 7
    group.healthy, group.stats = False, None
    found = await scrape(server.metrics_port)
    assert found["latentray:healthy",] == 0
    assert ("vllm:num_requests_running",) not in found


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, LEGACY_NAMES, ""])
async def test_every_consumer_finds_what_vllms_dashboard_asks_for(serve, accept) -> None:
    group = ScriptedGroup()
    group.stats = STATS
    server = await serve(group, metrics_port=0)
    async with AsyncClient(server.address) as client:
        await client.generate([5, 6, 7], max_tokens=7, stream=False)
    content_type, text = await fetch(server.metrics_port, accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0" if accept else "text/plain")
    parse = parse_openmetrics if accept else parse_text
    families = {family.name: family.type for family in parse(text)}
    assert "unknown" not in families.values(), "samples whose names no TYPE declares"
    found = await scrape(server.metrics_port, accept)
    assert {name for name, *_ in found} >= DASHBOARD
    assert all(math.isfinite(value) for value in found.values())


async def test_requests_that_end_early_are_counted_by_their_cause(serve, stub_of) -> None:
    group = ScriptedGroup(lambda r: [update(r, [1]), asyncio.Event()])
    server = await serve(group, metrics_port=0)
    stub = stub_of(server)

    def request(name: str, **params: object) -> pb.GenerateRequest:
        message = pb.GenerateRequest(request_id=name, stream=True)
        message.tokenized.input_ids.extend([10, 11])
        message.sampling_params.CopyFrom(pb.SamplingParams(**params))
        return message

    async def fail(call: grpc.aio.UnaryStreamCall) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass

    await fail(stub.Generate(request("bad", top_p=7.0)))
    aborted = stub.Generate(request("aborted", n=2))
    await anext(aiter(aborted))
    await stub.Abort(pb.AbortRequest(request_ids=["aborted"]))
    await fail(aborted)
    await fail(stub.Generate(request("late"), timeout=0.3))
    gone = stub.Generate(request("gone"))
    await anext(aiter(gone))
    gone.cancel()
    group.script = lambda r: [OverloadedError("the queue is full")]
    await fail(stub.Generate(request("full")))
    group.script = lambda r: [ValueError("a fault of ours")]
    await fail(stub.Generate(request("fault")))
    await until(lambda: not group.live)
    found = await scrape(server.metrics_port, PROMETHEUS_3)
    failed = {
        code: value
        for (name, *code), value in found.items()
        for code in code
        if name.endswith("_failed_total") and value
    }
    assert failed == {
        "invalid_request": 1,
        "aborted": 1,
        "deadline_exceeded": 1,
        "client_gone": 1,
        "overloaded": 1,
        "internal": 1,
    }
    finished = {
        reason: found["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 0, "length": 0, "abort": 4, "error": 2}, "both choices of an aborted one"


async def test_the_access_log_has_a_line_for_each_request_and_no_text_of_it(serve, stub_of, caplog) -> None:
    caplog.set_level(logging.INFO, "latentray.access")
    server = await serve(ScriptedGroup())
    stub = stub_of(server)
    message = pb.GenerateRequest(request_id='r\n"1"', text="precious secret", stream=True)
    message.sampling_params.CopyFrom(pb.SamplingParams(max_tokens=4))
    async for _ in stub.Generate(message):
        pass
    message.request_id = "bad"
    message.sampling_params.stop.extend(["secret"] * 17)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in stub.Generate(message):
            pass
    good, bad = (record.getMessage() for record in caplog.records if record.name == "latentray.access")
    assert good.startswith(r'id="r\n\"1\"" finish=length prompt_tokens=')
    facts = dict(fact.split("=") for fact in good.split()[1:])
    assert (facts["cached_tokens"], facts["completion_tokens"]) == ("0", "4")
    assert 0 <= float(facts["first_token_s"]) <= float(facts["total_s"])
    assert bad.startswith('id="bad" finish=error')
    assert bad.endswith('code=invalid_request field="stop"')
    assert "secret" not in good + bad


async def test_statistics_are_logged_while_something_happens(serve, caplog, monkeypatch) -> None:
    monkeypatch.setattr(stats_log, "INTERVAL_S", 0.02)
    caplog.set_level(logging.INFO, "latentray.stats")
    idle, busy = ScriptedGroup(), ScriptedGroup()
    await serve(idle, groups=[idle, busy])

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "latentray.stats"]

    busy.stats = STATS
    await until(lambda: bool(told()))
    assert told()[0].startswith("group 1: 3 running, 2 waiting, ")
    busy.stats = GroupStats()  # a coordinator that was started anew, and idles
    await asyncio.sleep(0.1)
    caplog.clear()
    await asyncio.sleep(0.1)
    assert told() == []


async def test_idle_connections_cost_no_threads(serve) -> None:
    server = await serve(ScriptedGroup(), metrics_port=0)
    before, idle = threading.active_count(), []
    try:
        for _ in range(100):
            idle.append(socket.create_connection(("127.0.0.1", server.metrics_port)))
        await fetch(server.metrics_port)
        assert threading.active_count() <= before + 5  # of asyncio.to_thread, for the fetch
    finally:
        for connection in idle:
            connection.close()


async def test_a_taken_metrics_port_is_told(serve) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="--metrics-port"):
            await serve(ScriptedGroup(), metrics_port=other.getsockname()[1])


async def test_statistics_over_grpc_alone(serve) -> None:
    group = ScriptedGroup()
    nodes = {"10.0.0.1": "coordinator, shard 0", "10.0.0.2": "shard 1"}
    server = await serve(group, actors_by_node=nodes)
    async with AsyncClient(server.address) as client:
        assert (await client.server_info()).actors_by_node == nodes
        group.stats = STATS
        assert (await client.loads())[0].stats == STATS
        group.stats = None
        assert (await client.loads())[0].stats is None
        group.stats = STATS
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", "--server", server.address])
    assert result.exit_code == 0, result.output
    assert "75%, 50%, 33%" in result.output
    assert "1 x 0, 2 x 2" in result.output
    assert "node      runs\n10.0.0.1  coordinator, shard 0\n10.0.0.2  shard 1\n" in result.output


async def test_what_is_refused_before_it_is_read_is_logged_and_counted_too(serve, caplog) -> None:
    """By its size, by its bytes, by its headers: operators see each refusal once, with its id where one is
    known.
    """
    server = await serve(ScriptedGroup(), metrics_port=0, http_port=0, max_message_bytes=2**20)
    many = pb.GenerateRequest(request_id="many")
    many.tokenized.input_ids.extend([1] * (MAX_VOCABULARY + 1))
    long = pb.GenerateRequest(request_id="long", text="x" * (2**20 + 1))
    caplog.set_level(logging.INFO, "latentray.access")
    async with grpc.aio.insecure_channel(server.address) as channel:
        generate = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        for data in (many.SerializeToString(), long.SerializeToString(), b"\x0a\x03bad\xff\xff"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in generate(data):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        abort = channel.unary_unary("/vllm.grpc.engine.VllmEngine/Abort")
        with pytest.raises(grpc.aio.AioRpcError):
            await abort(b"\xff")
    told = [r.getMessage() for r in caplog.records if r.name == "latentray.access"]
    assert [line.partition(" ")[0] for line in told] == ['id="many"', 'id="long"', 'id="bad"', 'id=""']
    assert [line.rpartition(" field=")[2] for line in told] == [
        '"tokenized.input_ids"',
        '"text"',
        '"message"',
        '"message"',
    ]
    url = f"http://127.0.0.1:{server.http_port}"
    async with aiohttp.ClientSession() as session:
        for path, content, more in (
            ("/v1/completions", b"x" * (2**20 + 1), {}),
            ("/v1/completions", b"{}", {"Content-Type": "text/plain"}),
            ("/v1/completions", b"{", {}),
            ("/v1/completions", b"{}", {"X-Request-Timeout": "0"}),
            ("/v1/completions", b"{}", {"X-Request-Id": "x" * 300}),
            ("/tokenize", b"{}", {}),
            ("/v1/nothing", b"{}", {}),
        ):
            headers = {"Content-Type": "application/json", "X-Request-Id": "web"} | more
            caplog.clear()
            async with session.post(url + path, data=content, headers=headers) as found:
                assert 400 <= found.status < 500
            (told,) = (r.getMessage() for r in caplog.records if r.name == "latentray.access")
            assert told.startswith(f'id="{headers["X-Request-Id"][:200]}" finish=error'), path
        async with session.get(url + "/health") as found:
            assert found.status == 200
    scraped = await scrape(server.metrics_port, PROMETHEUS_3)
    refused = {key[1:]: n for key, n in scraped.items() if key[0].endswith("requests_failed_total") and n}
    assert refused == {("invalid_request",): 11}
