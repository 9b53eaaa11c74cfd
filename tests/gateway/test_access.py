"""API keys, tenants and certificates over real connections."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from click.testing import Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from cluster.access.access import AccessFiles
from cluster.access.tls import TlsFiles
from cluster.cli.app import app
from cluster.client import AsyncClient, Credentials
from cluster.control.client import carry_out
from cluster.control.command import Command
from cluster.control.desk import ControlDesk
from cluster.gateway import GatewayServer
from kernels_integration.errors import (
    AbortedError,
    ConfigError,
    DuplicateRequestError,
    InvalidApiKeyError,
    LatentrayError,
    OverloadedError,
    UnavailableError,
)
from tests.gateway.conftest import Serve
from tests.support.certificates import Authority
from tests.support.scripted_group import ScriptedGroup, echo
from tests.unit.access.test_api_keys import KEY_A, KEY_B, TWO_TENANTS, write

WRONG = "sk-wrong-wrong-wrong"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return write(tmp_path / "keys", TWO_TENANTS)


def client_of(server: GatewayServer, key: str | None = None, **credentials: Any) -> AsyncClient:
    return AsyncClient(
        server.address, decode=False, credentials=Credentials(api_key=key, **credentials), timeout_s=5
    )


def held(until: asyncio.Event) -> ScriptedGroup:
    """Its requests run until then."""
    return ScriptedGroup(lambda request: [until, *echo(request)])


async def eventually(check: Any) -> None:
    async with asyncio.timeout(20):
        while not await check():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("key", [None, WRONG])
async def test_grpc_refuses_every_call_but_health_without_a_key(
    serve: Serve, keys: str, key: str | None
) -> None:
    server = await serve(ScriptedGroup(), access=AccessFiles(api_keys=keys))
    async with client_of(server, key) as client:
        for call in (client.model_info, client.server_info, client.loads, client.tokenizer):
            with pytest.raises(InvalidApiKeyError, match=r"API key is (missing|not valid)"):
                await call()
        with pytest.raises(InvalidApiKeyError):
            await client.abort(["r"])
        with pytest.raises(InvalidApiKeyError):
            await client.generate([1, 2], stream=False)
        with pytest.raises(InvalidApiKeyError):
            [piece async for piece in client.generate([1, 2])]
        assert (await client.health()).healthy
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        refused = channel.unary_unary("/vllm.grpc.engine.VllmEngine/Unknown")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused(b"garbage")
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with client_of(server, KEY_A) as client:
        assert (await client.generate([1, 2], stream=False, max_tokens=2)).token_ids


async def test_http_answers_401_in_openais_envelope_and_leaves_probes_open(serve: Serve, keys: str) -> None:
    server = await serve(ScriptedGroup(), access=AccessFiles(api_keys=keys), http_port=0, metrics_port=0)
    base = f"http://127.0.0.1:{server.http_port}"
    async with aiohttp.ClientSession() as session:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/status.json", "/nowhere"):
            for headers in ({}, {"Authorization": f"Bearer {WRONG}"}):
                async with session.get(base + path, headers=headers) as answer:
                    assert answer.status == 401
                    error = (await answer.json())["error"]
                    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        for path in ("/health", "/ready", "/status"):
            async with session.get(base + path) as answer:
                assert answer.status == 200
        # One connection: its next request does not inherit the tenant.
        async with session.get(f"{base}/v1/models", headers={"Authorization": f"Bearer {KEY_A}"}) as answer:
            assert answer.status == 200
        async with session.get(f"{base}/v1/models") as answer:
            assert answer.status == 401
        async with session.get(f"http://127.0.0.1:{server.metrics_port}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        refused = {
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "latentray:requests_failed_total" and sample.labels["code"] == "invalid_api_key"
        }
        assert refused == {11.0}
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=WRONG, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=KEY_B, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_only_an_operators_key_gives_orders(serve: Serve, keys: str) -> None:
    desk = ControlDesk()
    server = await serve(ScriptedGroup(), access=AccessFiles(api_keys=keys), desk=desk)

    def give(key: str | None) -> list[str]:
        command = Command(do="drain", where="0")
        return list(carry_out(server.address, command, Credentials(api_key=key)))

    for key, words in ((None, "is missing"), (WRONG, "not valid"), (KEY_A, "tenant a gives no orders")):
        with pytest.raises(InvalidApiKeyError, match=words):
            await asyncio.to_thread(give, key)
    order = asyncio.create_task(desk.fetch())
    given = asyncio.ensure_future(asyncio.to_thread(give, KEY_B))
    assert (await order).where == "0", "it is the first order that arrived"
    desk.end()
    assert await given == []


async def test_a_tenants_ids_are_its_own(serve: Serve, keys: str) -> None:
    server = await serve(held(asyncio.Event()), access=AccessFiles(api_keys=keys))
    async with client_of(server, KEY_A) as a, client_of(server, KEY_B) as b:
        live = {
            name: asyncio.ensure_future(client.generate([1], stream=False, request_id="r"))
            for name, client in (("a", a), ("b", b))
        }

        async def both_run() -> bool:
            return (await a.server_info()).active_requests == 2

        await eventually(both_run)
        with pytest.raises(DuplicateRequestError):
            await a.generate([1], stream=False, request_id="r")
        await b.abort(["r"])
        with pytest.raises(AbortedError):
            await live["b"]
        await asyncio.sleep(0.1)
        assert not live["a"].done()
        await b.abort(["r"])
        assert (await a.server_info()).active_requests == 1
        await a.abort(["r"])
        with pytest.raises(AbortedError):
            await live["a"]


async def test_a_tenant_has_as_many_requests_as_its_keys_allow(serve: Serve, keys: str) -> None:
    server = await serve(held(asyncio.Event()), access=AccessFiles(api_keys=keys))
    async with client_of(server, KEY_A) as a, client_of(server, KEY_B) as b:
        live = [asyncio.ensure_future(a.generate([1], stream=False, request_id=str(i))) for i in range(2)]

        async def both_run() -> bool:
            return (await a.server_info()).active_requests == 2

        await eventually(both_run)
        with pytest.raises(OverloadedError, match=r"tenant a has 2 requests .*max-requests 2"):
            await a.generate([1], stream=False)
        other = asyncio.ensure_future(b.generate([1], stream=False, request_id="0"))
        await a.abort(["0"])
        with pytest.raises(AbortedError):
            await live[0]
        live.append(asyncio.ensure_future(a.generate([1], stream=False, request_id="2")))
        await eventually(lambda: _is(b, 3))
        await a.abort(["1", "2"])
        await b.abort(["0"])
        outcomes = await asyncio.gather(*live[1:], other, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [AbortedError] * 3


async def _is(client: AsyncClient, num_live: int) -> bool:
    return (await client.server_info()).active_requests == num_live


async def test_changed_keys_are_in_force_without_a_restart(serve: Serve, keys: str) -> None:
    server = await serve(ScriptedGroup(), access=AccessFiles(api_keys=keys))
    async with client_of(server, KEY_A) as a, client_of(server, KEY_B) as b:
        await a.model_info()
        write(Path(keys), f"keys: [{{tenant: b, key: {KEY_B}}}]")

        async def is_refused() -> bool:
            try:
                await a.model_info()
            except InvalidApiKeyError:
                return True
            return False

        await eventually(is_refused)
        await b.model_info()
        write(Path(keys), "keys: [broken")
        await asyncio.sleep(1.5)
        await b.model_info()
        with pytest.raises(InvalidApiKeyError):
            await a.model_info()


@pytest.fixture
async def tls_server(serve: Serve, tmp_path: Path) -> tuple[GatewayServer, Authority]:
    """It asks for certificates of clients that the same authority has signed."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = TlsFiles(cert=str(cert), key=str(key), client_ca=str(authority.ca))
    return (
        await serve(ScriptedGroup(), access=AccessFiles(tls=tls), http_port=0, metrics_port=0),
        authority,
    )


def shown(authority: Authority, name: str = "client", **issue: Any) -> dict[str, str]:
    cert, key = authority.issue(name, **issue)
    trusted = authority.ca.with_suffix(".trusted")  # a copy: tests replace what the server reads
    if not trusted.exists():
        trusted.write_bytes(authority.ca.read_bytes())
    return {"tls_ca": str(trusted), "tls_cert": str(cert), "tls_key": str(key)}


def http_context(given: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=given["tls_ca"])
    if "tls_cert" in given:
        context.load_cert_chain(given["tls_cert"], given["tls_key"])
    return context


async def test_only_certificates_of_the_authority_are_served(
    tls_server: tuple[GatewayServer, Authority], tmp_path: Path
) -> None:
    server, authority = tls_server
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger")
    good = shown(authority)
    refused = {
        "no certificate": {"tls_ca": good["tls_ca"]},
        "expired": shown(authority, "old", days=(-9, -1)),
        "a stranger's": shown(stranger) | {"tls_ca": good["tls_ca"]},
        "another server is expected": good | {"tls_ca": str(stranger.ca)},
    }
    ports = (server.http_port, server.metrics_port)
    for name, given in refused.items():
        async with client_of(server, **given) as client:
            with pytest.raises(UnavailableError):
                assert await client.model_info() is name, "it was served"
        async with aiohttp.ClientSession() as session:
            for port in ports:
                with pytest.raises(aiohttp.ClientError):
                    assert (
                        await session.get(f"https://127.0.0.1:{port}/metrics", ssl=http_context(given))
                        is name
                    )
    async with client_of(server) as client:
        with pytest.raises(LatentrayError):  # in the clear
            await client.model_info()
    async with client_of(server, **good) as client:
        assert (await client.generate([1, 2], stream=False, max_tokens=2)).token_ids
    async with aiohttp.ClientSession() as session:
        for port in ports:
            async with session.get(f"https://127.0.0.1:{port}/metrics", ssl=http_context(good)) as answer:
                assert answer.status == 200


async def test_another_authority_of_clients_replaces_the_one_before(
    tls_server: tuple[GatewayServer, Authority], tmp_path: Path
) -> None:
    server, authority = tls_server
    (tmp_path / "next").mkdir()
    successor = Authority(tmp_path / "next", "successor")
    before = shown(authority)
    after = shown(successor) | {"tls_ca": before["tls_ca"]}

    async def served(given: dict[str, str]) -> list[bool]:
        """By gRPC, HTTP and the port of metrics, over new connections."""
        answers = []
        async with client_of(server, **given) as client:
            try:
                answers.append((await client.health()).healthy)
            except UnavailableError:
                answers.append(False)
        async with aiohttp.ClientSession() as session:
            for port in (server.http_port, server.metrics_port):
                try:
                    url = f"https://127.0.0.1:{port}/metrics"
                    async with session.get(url, ssl=http_context(given)) as answer:
                        answers.append(answer.status == 200)
                except aiohttp.ClientError:
                    answers.append(False)
        return answers

    assert await served(before) == [True] * 3
    assert await served(after) == [False] * 3
    new = tmp_path / "new.pem"
    new.write_bytes(successor.ca.read_bytes())
    new.replace(authority.ca)

    async def is_replaced() -> bool:
        return await served(after) == [True] * 3

    await eventually(is_replaced)
    assert await served(before) == [False] * 3


async def _certificate_of(port: int, given: dict[str, str]) -> str:
    """The name in the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=http_context(given))
    [[(_, name)]] = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return str(name)


async def test_a_new_certificate_serves_new_connections_and_drops_no_stream(
    serve: Serve, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("first")
    access = AccessFiles(tls=TlsFiles(cert=str(cert), key=str(key)))
    may_end = asyncio.Event()
    group = held(may_end)
    server = await serve(group, access=access, http_port=0)
    given = {"tls_ca": str(authority.ca)}
    ports = (server.port, server.http_port)
    async with client_of(server, **given) as before, aiohttp.ClientSession() as session:
        streams = [
            asyncio.ensure_future(before.generate([1], stream=False, request_id=f"r{i}", max_tokens=2))
            for i in range(8)
        ]
        streams += [
            asyncio.ensure_future(
                session.post(
                    f"https://127.0.0.1:{server.http_port}/v1/completions",
                    json={"prompt": [1], "max_tokens": 2},
                    ssl=http_context(given),
                )
            )
            for _ in range(8)
        ]
        await eventually(lambda: _is(before, 16))
        authority.issue("second", into="first")

        async def is_second() -> bool:
            return {await _certificate_of(port, given) for port in ports} == {"second"}

        await eventually(is_second)
        authority.issue("expired", days=(-9, -1), into="first")
        await asyncio.sleep(1.5)
        assert await is_second()
        async with client_of(server, **given) as after:
            assert (await after.model_info()).served_model_name == "tiny"
        assert not any(stream.done() for stream in streams)
        may_end.set()
        answers: list[Any] = await asyncio.gather(*streams)
        assert all(answer.token_ids for answer in answers[:8])
        assert {answer.status for answer in answers[8:]} == {200}


async def test_commands_show_their_key_and_certificate(
    serve: Serve, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = TlsFiles(cert=str(cert), key=str(key), client_ca=str(authority.ca))
    server = await serve(ScriptedGroup(), access=AccessFiles(api_keys=keys, tls=tls), desk=ControlDesk())
    given = shown(authority)
    certificates = [word for name, path in given.items() for word in (f"--{name.replace('_', '-')}", path)]

    async def run(*argv: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*argv, "--server", server.address])

    monkeypatch.delenv("LATENTRAY_API_KEY", raising=False)
    assert isinstance((await run("status")).exception, LatentrayError)
    assert isinstance((await run("status", *certificates)).exception, InvalidApiKeyError)
    by_flag = await run("status", *certificates, "--api-key", KEY_A)
    assert by_flag.exit_code == 0, by_flag.output
    monkeypatch.setenv("LATENTRAY_API_KEY", KEY_A)
    generated = await run("generate", *certificates, "--max-tokens", "3", "Hello")
    assert generated.exit_code == 0, generated.output
    for argv in (["drain", "0"], ["undrain", "0"], ["restart", "0"]):
        refused = (await run(*argv, *certificates)).exception
        assert "tenant a gives no orders" in str(refused)
    half = await run("status", *certificates[:4])
    assert isinstance(half.exception, ConfigError)
    missing = await run("status", "--tls-ca", str(tmp_path / "none"))
    assert isinstance(missing.exception, ConfigError)


async def test_garbage_on_the_ports_fills_no_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve(ScriptedGroup(), http_port=0, metrics_port=0)
    for port in (server.port, server.http_port, server.metrics_port):
        for sent in (
            b"\xff\x00" * 100,
            b"GET /\xff HTTP/9.9\r\n\r\n",
            b"A" * 40000,
            b"\x16\x03\x01" + bytes(300),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(), 0.3)
            writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    async with client_of(server) as client:
        assert (await client.generate([1, 2], stream=False, max_tokens=2)).token_ids
