"""Generate: messages, errors and every way a call can end."""

import asyncio
import contextlib
import logging
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from cluster.gateway.servicer import SERVICE_NAME
from kernels_integration.errors import DuplicateRequestError, OverloadedError, UnavailableError
from tests.support.scripted_group import ScriptedGroup, echo, logprob_of, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]


def request(
    request_id: str = "r", ids: tuple[int, ...] = (10, 11, 12, 13), stream: bool = True, **params: object
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def answer(stub, message: pb.GenerateRequest, **options) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(message, **options)]


async def failure(awaitable) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


def detail_of(error: grpc.aio.AioRpcError, kind: type):
    status = rpc_status.from_call(error)
    found = kind()
    return found if any(detail.Unpack(found) for detail in status.details) else None


async def test_a_stream_is_delta_chunks_then_one_complete_with_totals(serve, stub_of):
    was_read = [asyncio.Event(), asyncio.Event()]

    def step_by_step(request):
        first, second, last = echo(request)
        return [first, was_read[0], second, was_read[1], last]

    group = ScriptedGroup(step_by_step)
    stub = stub_of(await serve(group))
    responses = []
    async for response in stub.Generate(request(max_tokens=8)):
        for event in was_read[len(responses) : len(responses) + 1]:
            event.set()
        responses.append(response)
    assert [r.WhichOneof("response") for r in responses] == ["chunk", "chunk", "chunk", "complete"]
    chunks, complete = [r.chunk for r in responses[:-1]], responses[-1].complete
    assert [list(c.token_ids) for c in chunks] == [[10, 11, 12], [13, 10, 11], [12, 13]]
    assert [c.completion_tokens for c in chunks] == [3, 3, 2]
    assert {c.prompt_tokens for c in chunks} == {4}
    assert list(complete.output_ids) == [10, 11, 12, 13, 10, 11, 12, 13]
    assert complete.finish_reason == "length"
    assert (complete.prompt_tokens, complete.completion_tokens) == (4, 8)
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (6, 3)
    assert group.ended == {"r": "finished"}


async def test_a_call_that_does_not_stream_gets_one_complete(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    [response] = await answer(stub, request(stream=False, max_tokens=8, logprobs=2))
    complete = response.complete
    assert list(complete.output_ids) == [10, 11, 12, 13, 10, 11, 12, 13]
    assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
    assert list(complete.output_logprobs.top_logprobs[3].token_ids) == [13, 14]


async def test_logprobs_travel_with_their_tokens(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    responses = await answer(stub, request(max_tokens=5, logprobs=3))
    for chunk in (r.chunk for r in responses[:-1]):
        expected = [logprob_of(t, 3) for t in chunk.token_ids]
        assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
        assert list(chunk.output_logprobs.token_logprobs) == [e.logprob for e in expected]
        tops = [tuple(zip(t.token_ids, t.values, strict=True)) for t in chunk.output_logprobs.top_logprobs]
        assert tops == [e.top for e in expected]
    assert not responses[-1].complete.HasField("output_logprobs")


async def test_logprobs_0_are_those_of_the_tokens_alone_and_unset_is_none(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    [zero] = await answer(stub, request("a", stream=False, max_tokens=4, logprobs=0))
    [none] = await answer(stub, request("b", stream=False, max_tokens=4))
    assert len(zero.complete.output_logprobs.token_logprobs) == 4
    assert not zero.complete.output_logprobs.top_logprobs
    assert not none.complete.HasField("output_logprobs")


async def test_text_input_is_tokenised_as_the_front_end_does(serve, stub_of, frontend):
    group = ScriptedGroup()
    stub = stub_of(await serve(group))
    text = "What is the capital of France?"
    message = pb.GenerateRequest(request_id="t", text=text)
    message.sampling_params.max_tokens = 1
    await answer(stub, message)
    assert group.requests[-1].prompt_token_ids == frontend.encode_prompt(text)


@pytest.mark.parametrize(("stop", "expected"), [("|x|", "|x|"), (12, 12), (None, None)])
async def test_matched_stop(serve, stub_of, stop, expected):
    group = ScriptedGroup(lambda r: [update(r, [10, 12], finish_reason="stop", matched_stop=stop)])
    stub = stub_of(await serve(group))
    complete = (await answer(stub, request()))[-1].complete
    kind = complete.WhichOneof("matched_stop")
    assert (getattr(complete, kind) if kind else None) == expected
    assert complete.finish_reason == "stop"


async def test_tokens_that_may_begin_a_stop_string_wait_until_that_is_decided(serve, stub_of):
    """The group says how many of the newest it cannot let go yet."""
    held = [0, 1, 2, 0, 1, 0]
    gates = [asyncio.Event() for _ in held]

    def script(r):
        steps = []
        for i, (num_held, gate) in enumerate(zip(held, gates, strict=True)):
            final = {"finish_reason": "stop", "matched_stop": "END"} if i == len(held) - 1 else {}
            steps += [gate, update(r, [10 + i], i, num_held=num_held, **final)]
        return steps

    stub = stub_of(await serve(ScriptedGroup(script)))
    call = stub.Generate(request(stop=["END"], logprobs=1))
    seen: list[int] = []

    async def read() -> None:
        async for response in call:
            chunk = response.chunk
            seen.extend(chunk.token_ids)
            assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
            assert chunk.completion_tokens == len(chunk.token_ids)

    reading = asyncio.create_task(read())
    for i, gate in enumerate(gates):
        gate.set()
        await until(lambda n=i + 1 - held[i]: len(seen) == n)
        await asyncio.sleep(0.02)
        assert seen == list(range(10, 11 + i - held[i]))
    await reading


async def test_every_parameter_reaches_the_group(serve, stub_of):
    group = ScriptedGroup()
    stub = stub_of(await serve(group))
    params = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "max_tokens": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "skip_special_tokens": True,
        "ignore_eos": True,
        "logprobs": 2,
        "seed": -5,
    }
    await answer(stub, request(**params))
    got = group.requests[-1].params
    for name, value in params.items():
        value = tuple(value) if isinstance(value, list) else value
        assert getattr(got, name) == value, name
    assert group.requests[-1].seed == 2**64 - 5


async def test_the_effective_seed_is_reported(serve, stub_of):
    group = ScriptedGroup()
    stub = stub_of(await serve(group))
    call = stub.Generate(request(max_tokens=1))
    metadata = dict(await call.initial_metadata())
    assert [r async for r in call]
    assert metadata["latentray-seed"] == str(group.requests[-1].seed)
    assert metadata["latentray-request-id"] == "r"


async def test_an_id_that_outgrows_metadata_is_served_all_the_same(serve, stub_of):
    group = ScriptedGroup()
    stub = stub_of(await serve(group))
    for request_id in ("x" * 100_000, "\0", "é"):
        call = stub.Generate(request(request_id, max_tokens=1))
        assert "latentray-request-id" not in dict(await call.initial_metadata())
        assert [r async for r in call]
        assert group.requests[-1].request_id == request_id


async def test_a_request_without_an_id_gets_one(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    calls = [stub.Generate(request("", max_tokens=2)) for _ in range(2)]
    ids = {dict(await call.initial_metadata())["latentray-request-id"] for call in calls}
    assert len(ids) == 2
    for call in calls:
        assert [r async for r in call][-1].complete.completion_tokens == 2


async def test_a_live_duplicate_is_refused_and_a_finished_id_may_come_again(serve, stub_of):
    gate = asyncio.Event()
    group = ScriptedGroup(lambda r: [update(r, [1]), gate, update(r, [2], 1, finish_reason="length")])
    stub = stub_of(await serve(group))
    first = aiter(stub.Generate(request("same")))
    await anext(first)
    error = await failure(answer(stub, request("same")))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "same" in error.details()
    gate.set()
    assert [r async for r in first][-1].complete.finish_reason == "length"
    assert (await answer(stub, request("same")))[-1].complete.finish_reason == "length"


@pytest.mark.parametrize("phase", ["queued", "streaming", "unary", "held"])
async def test_abort_ends_the_call_in_every_phase(serve, stub_of, phase):
    never = asyncio.Event()
    scripts = {
        "queued": lambda r: [never],
        "streaming": lambda r: [update(r, [10]), never],
        "unary": lambda r: [update(r, [10]), never],
        "held": lambda r: [update(r, [10]), never],
    }
    group = ScriptedGroup(scripts[phase])
    stub = stub_of(await serve(group))
    params = {"stop": ["zzz"]} if phase == "held" else {}
    call = stub.Generate(request("r", stream=phase != "unary", **params))
    responses = aiter(call)
    if phase == "streaming":
        await anext(responses)
    await until(lambda: group.live == {"r"})
    await stub.Abort(pb.AbortRequest(request_ids=["r", "unknown"]))
    async with asyncio.timeout(1):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                pass
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert "Abort" in caught.value.details()
    await until(lambda: not group.live)
    assert group.ended == {"r": "aborted"}
    await stub.Abort(pb.AbortRequest(request_ids=["r"]))  # again: no error


async def test_abort_ends_a_stream_whose_client_does_not_read(serve, stub_of):
    # Less than what ends the call of a reader that is behind, more than what connections buffer.
    group = ScriptedGroup(lambda r: [*[update(r, list(range(100)) * 10)] * 800, asyncio.Event()])
    stub = stub_of(await serve(group))
    call = aiter(stub.Generate(request("r")))
    await anext(call)
    await asyncio.sleep(0.3)  # flow control has stopped the server
    assert group.live == {"r"}
    await stub.Abort(pb.AbortRequest(request_ids=["r"]))
    await until(lambda: not group.live, 1)
    assert (await failure(_drain(call))).code() is grpc.StatusCode.CANCELLED


async def _drain(call) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_call_is_aborted_in_the_group(serve, stub_of, stream):
    group = ScriptedGroup(lambda r: [update(r, [10]), asyncio.Event()])
    stub = stub_of(await serve(group))
    call = stub.Generate(request(stream=stream))
    reading = asyncio.create_task(_drain(call))
    await until(lambda: bool(group.live))
    call.cancel()
    await until(lambda: not group.live, 1)
    assert group.ended == {"r": "aborted"}
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await reading


async def test_a_client_that_disconnects_is_aborted_in_the_group(serve, stub_of):
    group = ScriptedGroup(lambda r: [update(r, [10]), asyncio.Event()])
    server = await serve(group)
    channel = grpc.aio.insecure_channel(server.address)
    call = type(stub_of(server))(channel).Generate(request())
    await call.read()
    await channel.close()
    await until(lambda: not group.live, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_ends_the_request_in_the_group(serve, stub_of, stream):
    group = ScriptedGroup(lambda r: [update(r, [10]), asyncio.Event()])
    stub = stub_of(await serve(group))
    error = await failure(answer(stub, request(stream=stream), timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not group.live, 1)
    assert group.ended == {"r": "aborted"}


async def test_a_request_whose_deadline_passed_before_the_server_looked_reaches_no_group(serve):
    group = ScriptedGroup()
    server = await serve(group)

    connected, go = threading.Event(), threading.Event()

    def ask() -> grpc.StatusCode:
        with grpc.insecure_channel(server.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            stub.HealthCheck(pb.HealthCheckRequest())
            connected.set()
            go.wait()
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request(), timeout=0.2))
            return caught.value.code()

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await until(connected.is_set)
    go.set()
    time.sleep(0.5)  # the server's loop is busy while the request arrives and expires
    assert await asking is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.sleep(0.1)
    assert not group.requests


@pytest.mark.parametrize(
    ("cause", "status", "retry"),
    [
        (OverloadedError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (UnavailableError("a shard died"), grpc.StatusCode.UNAVAILABLE, True),
        (DuplicateRequestError("live elsewhere"), grpc.StatusCode.ALREADY_EXISTS, False),
    ],
)
@pytest.mark.parametrize("after_tokens", [False, True])
async def test_a_failure_of_the_group_is_a_status_with_details(
    serve, stub_of, cause, status, retry, after_tokens
):
    stub = stub_of(await serve(ScriptedGroup(lambda r: [update(r, [1])] * after_tokens + [cause])))
    error = await failure(answer(stub, request()))
    assert error.code() is status
    if status is grpc.StatusCode.UNAVAILABLE:  # a group that is lost is asked again some times
        assert (
            error.details().endswith(f"times, and its last group was lost too: {cause}") or not after_tokens
        )
        assert error.details().endswith(f"and its last group was lost too: {cause}")
    else:
        assert error.details() == str(cause)
    info = detail_of(error, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("latentray", type(cause).code.upper())
    assert (detail_of(error, error_details_pb2.RetryInfo) is not None) == retry


@pytest.mark.parametrize(
    "cause", [RuntimeError("secret of the engine"), TimeoutError("inner"), KeyError("x")]
)
async def test_an_internal_fault_is_internal_with_an_id_that_the_log_has(serve, stub_of, caplog, cause):
    stub = stub_of(await serve(ScriptedGroup(lambda r: [cause])))
    with caplog.at_level(logging.ERROR):
        error = await failure(answer(stub, request(), timeout=30))
    assert error.code() is grpc.StatusCode.INTERNAL
    [record] = [r for r in caplog.records if r.name == "cluster.errors"]
    assert record.exc_info[1] is cause
    assert record.args[0] in error.details()
    assert str(cause) not in error.details()


async def test_an_unhealthy_group_refuses_with_unavailable(serve, stub_of):
    group = ScriptedGroup()
    group.healthy, group.message = False, "shard 1 is dead"
    stub = stub_of(await serve(group))
    error = await failure(answer(stub, request()))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "shard 1 is dead")


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        (pb.GenerateRequest(), "input", ["tokenized", "text"]),
        (request(ids=()), "prompt", ["empty"]),
        (request(ids=(1, 6144)), "prompt", ["6144", "6143"]),
        (request(ids=(1,) * 256), "prompt", ["256", "255"]),
        (pb.GenerateRequest(text=""), "prompt", ["empty"]),
        (pb.GenerateRequest(text="so it goes, " * 1000), "prompt", ["tokens", "255"]),
        (request(temperature=-1), "temperature", ["-1", "0"]),
        (request(temperature=float("nan")), "temperature", ["nan"]),
        (request(top_p=1.5), "top_p", ["1.5"]),
        (request(min_p=2), "min_p", ["2"]),
        (request(max_tokens=0), "max_tokens", ["0", ">= 1"]),
        (request(ids=(1,) * 200, max_tokens=57), "max_tokens", ["57", "200", "use at most 56", "256"]),
        (request(ids=(1,) * 200, min_tokens=57), "min_tokens", ["57", "200", "use at most 56", "256"]),
        (request(logprobs=21), "logprobs", ["21", "20"]),
        (request(stop=[""]), "stop", ["non-empty"]),
        (request(stop_token_ids=[9999]), "stop_token_ids", ["9999", "6143"]),
    ],
)
async def test_bad_input_names_field_value_and_rule(serve, stub_of, message, field, words):
    stub = stub_of(await serve(ScriptedGroup()))
    error = await failure(answer(stub, message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = detail_of(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == field
    for word in words:
        assert word in error.details()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *(
            (method, b"\xff")
            for method in ("Generate", "GetTokenizer", "Abort", "GetLoads", "HealthCheck", "Embed")
        ),
        ("Generate", b"\x0a\xff\xff"),  # a length beyond the end
        ("Abort", b"\x0a\x02\xff\xfe"),  # a text that is not UTF-8
    ],
)
async def test_bytes_that_are_no_message_are_the_clients_fault(serve, method, data):
    """gRPC says INTERNAL of them by itself."""
    server = await serve(ScriptedGroup())
    async with grpc.aio.insecure_channel(server.address) as channel:
        name = f"/{SERVICE_NAME}/{method}"
        if method in ("Generate", "GetTokenizer"):
            error = await failure(_drain(channel.unary_stream(name)(data)))
        else:
            error = await failure(channel.unary_unary(name)(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert method in error.details()
    assert detail_of(error, error_details_pb2.BadRequest).field_violations[0].field == "message"


async def test_a_status_fits_its_headers_whatever_the_input(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup()))
    error = await failure(answer(stub, request(stop=["漢字" * 2000])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail_of(error, error_details_pb2.BadRequest).field_violations[0].field == "stop"


async def test_a_message_beyond_the_limit_names_the_flag(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup(), max_message_bytes=2000))
    for message in (request(ids=(5,) * 2100), request(stop=["x" * 700] * 3)):
        error = await failure(answer(stub, message))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "--max-message-size" in error.details()
        assert "2000" in error.details()
    error = await failure(answer(stub, request(stream=False, max_tokens=200, logprobs=20)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "--max-message-size" in error.details()
    assert "stream" in error.details()
    assert (await answer(stub, request(max_tokens=200)))[-1].complete.completion_tokens == 200


async def test_32_streams_at_once_do_not_mix(serve, stub_of):
    stub = stub_of(await serve(ScriptedGroup(echo)))
    messages = [request(f"r{i}", ids=(100 + i, 200 + i), max_tokens=40) for i in range(32)]
    for i, responses in enumerate(await asyncio.gather(*(answer(stub, m) for m in messages))):
        ids = [t for r in responses for t in r.chunk.token_ids]
        assert ids == [100 + i, 200 + i] * 20
        assert [r.WhichOneof("response") for r in responses].count("complete") == 1
