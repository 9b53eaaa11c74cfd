"""The server against its own OpenAPI document, by schemathesis: which bodies it takes, and how it answers."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from cluster.gateway import GatewayServer
from cluster.http.openapi import openapi_document
from tests.support import peers
from tests.support.scripted_chat import Saying

pytestmark = [pytest.mark.gateway, pytest.mark.asyncio(loop_scope="module")]


async def test_what_the_document_says_holds(
    chat_server: GatewayServer, saying: Saying, tmp_path: Path
) -> None:
    """All that its schemas forbid is refused, no answer breaks them, and nothing is a fault of the server.

    A schema cannot say every rule (positive_data_acceptance), such as which token ids a vocabulary has.
    """
    saying.text = "<think>Hm.</think>Hello."
    command = [peers.schemathesis(), "run", f"http://127.0.0.1:{chat_server.http_port}/openapi.json"]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "6", "--generation-deterministic"]
    command += ["--no-color", "--continue-on-failure"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-8000:]
    assert "Tested: 13" in output.decode()


async def test_every_path_is_in_the_document(chat_server: GatewayServer) -> None:
    def get() -> dict[str, object]:
        url = f"http://127.0.0.1:{chat_server.http_port}/openapi.json"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: dict[str, object] = json.load(answer)
            return found

    assert await asyncio.to_thread(get) == openapi_document("tiny")
    server = chat_server._http_server
    assert server is not None
    served = {resource.canonical for resource in server._app.router.resources()}
    assert served - {"/openapi.json"} == openapi_document("tiny")["paths"].keys()
