"""Everything beside Generate: health, reflection, information, the port, draining."""

import asyncio
import hashlib
import io
import json
import socket
import zipfile
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.stats import GroupStats
from cluster.answering.group import Groups
from cluster.answering.live_requests import LiveRequests
from cluster.gateway.loads import WINDOW_S, Loads
from cluster.gateway.servicer import SERVICE_NAME
from kernels_integration.errors import ConfigError
from tests.support.scripted_group import ScriptedGroup, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def tokenized(request_id: str = "r", **params: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=request_id, stream=True)
    request.tokenized.input_ids.extend([10, 11])
    request.sampling_params.CopyFrom(pb.SamplingParams(**params))
    return request


async def status_of(awaitable) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code()


async def test_health_follows_the_group(serve, stub_of):
    group = ScriptedGroup()
    group.healthy, group.message = False, "starting"
    server = await serve(group)
    stub = stub_of(server)
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME)))
        names = ("", SERVICE_NAME)
        for healthy, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
            group.healthy = healthy
            for name in names:
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == status
            answer = await stub.HealthCheck(pb.HealthCheckRequest())
            assert (answer.healthy, answer.message) == (healthy, "starting")
            async with asyncio.timeout(1):
                assert (await anext(watch)).status == status
        unknown = health_pb2.HealthCheckRequest(service="other")
        assert await status_of(health.Check(unknown)) is grpc.StatusCode.NOT_FOUND
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {name: listed[name].status for name in listed} == dict.fromkeys(names, NOT_SERVING)
        first = await anext(aiter(health.Watch(unknown)))
        assert first.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_the_services(serve, version):
    """The messages of both versions are the same bytes; the descriptor of v1 must be built from its own."""
    server = await serve(ScriptedGroup())
    own = f"grpc.reflection.{version}.ServerReflection"
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.stream_stream(
            f"/{own}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=own),
        ]
        services, file, own_file = [answer async for answer in call(iter(asked))]
    assert {service.name for service in services.list_services_response.service} == {
        SERVICE_NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]
    pool = DescriptorPool()
    for data in own_file.file_descriptor_response.file_descriptor_proto:
        pool.AddSerializedFile(data)
    method = pool.FindServiceByName(own).methods_by_name["ServerReflectionInfo"]
    assert method.input_type.full_name == f"grpc.reflection.{version}.ServerReflectionRequest"


async def test_the_tokenizer_is_a_zip_with_its_sha_on_the_last_chunk(serve, stub_of, config):
    stub = stub_of(await serve(ScriptedGroup()))
    request = common_pb2.GetTokenizerRequest()
    chunks = [chunk async for chunk in stub.GetTokenizer(request)]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) > 1
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        for name in archive.namelist():
            assert archive.read(name) == (Path(config.model_path) / name).read_bytes()
    again = [chunk async for chunk in stub_of(await serve(ScriptedGroup())).GetTokenizer(request)]
    assert again[-1].sha256 == chunks[-1].sha256  # the same from every gateway


async def test_model_and_server_info(serve, stub_of, config):
    gate = asyncio.Event()
    stub = stub_of(
        await serve(ScriptedGroup(lambda r: [update(r, [1]), gate, update(r, [2], finish_reason="length")]))
    )
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    checkpoint = json.loads((Path(config.model_path) / "config.json").read_text())
    assert model.served_model_name == "tiny"
    assert model.tokenizer_path == model.model_path == config.model_path
    assert model.max_context_length == config.max_model_len
    assert model.model_type == checkpoint["model_type"]
    assert list(model.architectures) == checkpoint["architectures"]
    assert model.vocab_size == checkpoint["vocab_size"]
    assert list(model.eos_token_ids) == [1]
    assert (model.bos_token_id, model.pad_token_id, model.is_generation) == (0, 2, True)
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.7, "top_p": 0.9}
    call = aiter(stub.Generate(tokenized()))
    await anext(call)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.active_requests, server.data_parallel_size, server.server_type) == (1, 1, "vllm-grpc")
    assert (server.max_num_seqs, server.block_size, server.kv_cache_dtype) == (8, 16, "float32")
    assert not server.is_paused
    gate.set()
    async for _ in call:
        pass
    assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 0


async def test_loads(serve, stub_of):
    group = ScriptedGroup()
    stub = stub_of(await serve(group))
    group.stats = GroupStats(running=2, waiting=1, num_used_blocks=16, num_kv_blocks=64)
    answer = await stub.GetLoads(pb.GetLoadsRequest())
    [load] = answer.loads
    assert (answer.dp_rank_count, load.dp_rank) == (1, 0)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (256, 1024, 0.25)
    assert (load.max_running_requests, load.utilization) == (8, 0.25)
    group.stats = None  # before the first heartbeat
    assert (await stub.GetLoads(pb.GetLoadsRequest())).loads[0].max_total_num_tokens == 1024
    error = await status_of(stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)))
    assert error is grpc.StatusCode.INVALID_ARGUMENT


def test_tokens_per_second_is_that_of_the_last_window(config):
    now = 100.0
    group = ScriptedGroup()
    loads = Loads(Groups([group]), LiveRequests(), config, clock=lambda: now)
    assert loads.tokens_per_second(group) == 0
    for _ in range(20):
        group.stats = GroupStats(num_generated_tokens=int((now - 100) * 50))
        loads.sample()
        now += 1
    assert loads.tokens_per_second(group) == pytest.approx(50)
    for _ in range(int(WINDOW_S) + 1):
        loads.sample()
        now += 1
    assert loads.tokens_per_second(group) == 0
    group.stats = GroupStats(num_generated_tokens=3)  # a coordinator that started anew
    loads.sample()
    assert loads.tokens_per_second(group) == 0


async def test_waiting_tokens_are_those_of_the_youngest_unanswered_requests_of_the_group():
    live, group = LiveRequests(), ScriptedGroup()
    for name, size, answered, of in (
        ("a", 5, True, group),
        ("b", 7, False, group),
        ("x", 90, False, ScriptedGroup()),
        ("c", 11, False, group),
    ):
        request = live.enter(name)
        request.num_prompt_tokens, request.answered, request.group = size, answered, of
    assert [live.num_waiting_prompt_tokens(group, n) for n in range(4)] == [0, 11, 18, 18]


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_what_is_not_built_is_unimplemented_at_once(serve, stub_of, method, request_message):
    stub = stub_of(await serve(ScriptedGroup()))
    assert await status_of(getattr(stub, method)(request_message)) is grpc.StatusCode.UNIMPLEMENTED


async def test_kv_events_are_unimplemented_at_once(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    events = aiter(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
    assert await status_of(anext(events)) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
async def test_a_busy_port_is_refused_with_its_number_and_a_fix(serve, host):
    server = await serve(ScriptedGroup())
    with pytest.raises(ConfigError, match=rf"port {server.port} of {host} is in use.*--port"):
        await serve(ScriptedGroup(), host=host, port=server.port)


async def test_two_servers_that_start_at_once_do_not_share_a_port(serve, monkeypatch):
    monkeypatch.setattr("cluster.gateway.server.require_free", lambda host, port: None)  # lost the race
    server = await serve(ScriptedGroup())
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        await serve(ScriptedGroup(), port=server.port)


async def test_a_port_of_another_program_is_refused_as_well(serve):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use"):
        await serve(ScriptedGroup(), port=other.getsockname()[1])


async def test_a_port_can_be_used_again_at_once(serve, stub_of):
    server = await serve(ScriptedGroup())
    await stub_of(server).HealthCheck(pb.HealthCheckRequest())
    await server.stop(drain_s=0)
    again = await serve(ScriptedGroup(), port=server.port)
    assert again.port == server.port


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_a_host_that_is_not_ours_is_refused(serve, host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}"):
        await serve(ScriptedGroup(), host=host)


async def test_draining_lets_live_requests_end_and_refuses_new_ones(serve, stub_of):
    gate = asyncio.Event()
    group = ScriptedGroup(lambda r: [update(r, [1]), gate, update(r, [2], 1, finish_reason="stop")])
    server = await serve(group)
    stub = stub_of(server)
    live = aiter(stub.Generate(tokenized("live")))
    await anext(live)
    stopping = asyncio.create_task(server.stop(drain_s=5))
    waiting = asyncio.create_task(server.wait())
    await asyncio.sleep(0.05)
    assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    assert await status_of(anext(aiter(stub.Generate(tokenized("late"))))) is grpc.StatusCode.UNAVAILABLE
    assert not waiting.done()
    gate.set()
    rest = [response async for response in live]
    assert rest[-1].complete.finish_reason == "stop"
    await asyncio.wait_for(stopping, 2)
    await asyncio.wait_for(waiting, 1)


async def test_what_outlives_the_drain_ends_with_unavailable(serve, stub_of):
    group = ScriptedGroup(lambda r: [update(r, [1]), asyncio.Event()])
    server = await serve(group)
    live = aiter(stub_of(server).Generate(tokenized()))
    await anext(live)
    await server.stop(drain_s=0.05)
    assert await status_of(anext(live)) is grpc.StatusCode.UNAVAILABLE
    await until(lambda: not group.live)
    assert group.ended == {"r": "aborted"}
