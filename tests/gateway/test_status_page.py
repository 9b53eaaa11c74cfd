"""The status page: its JSON, and the page itself in a real browser, light and dark, phone and desktop."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.requests import Request
from actors.stats import GroupStats
from cluster.answering.group import Drained
from cluster.gateway import GatewayServer
from kernels_integration.errors import PoisonRequestError
from tests.support.scripted_group import Script, ScriptedGroup, echo

pytestmark = pytest.mark.gateway
Serve = Callable[..., Awaitable[GatewayServer]]
STATS = GroupStats(
    running=3,
    waiting=2,
    num_used_blocks=12,
    num_kv_blocks=64,
    num_finished=41,
    num_verifies=100,
    proposed=(100, 90, 80),
    accepted=(84, 60, 40),
    num_steps=200,
    step_s=0.5,
    num_cache_queries=400,
    num_cache_hits=100,
    epoch=2,
    num_restarts=1,
)
HOSTILE_ID = "<img src=x onerror=\"document.title='run'\">"


def poisoned(request: Request) -> Script:
    return [PoisonRequestError("it is rejected")] if "<" in request.request_id else echo(request)


async def served(serve: Serve) -> GatewayServer:
    """Two groups, of which one is lost, and one request that has failed."""
    well, lost = ScriptedGroup(poisoned), ScriptedGroup()
    well.stats = STATS
    lost.healthy, lost.message, lost.stats = False, "shard 1 on node 10.0.0.2 (process 77) is lost", None
    server = await serve(
        well,
        groups=[well, lost],
        http_port=0,
        actors_by_node={"10.0.0.1": "coordinator, shard 0", "10.0.0.2": "shard 1"},
    )
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    async with aiohttp.ClientSession() as session:
        for request_id, status in (("fine", 200), (HOSTILE_ID, 422)):
            async with session.post(
                _url(server, "/v1/completions"), json=body, headers={"X-Request-Id": request_id}
            ) as answer:
                assert answer.status == status, await answer.text()
    return server


def _url(server: GatewayServer, path: str) -> str:
    return f"http://127.0.0.1:{server.http_port}{path}"


async def test_the_document_tells_of_every_group_and_of_failures_without_texts(serve: Serve) -> None:
    server = await served(serve)
    async with aiohttp.ClientSession() as session, session.get(_url(server, "/status.json")) as answer:
        status = await answer.json()
    assert status["server"]["serving"]
    assert status["server"]["model"] == "tiny"
    well, lost = status["groups"]
    assert well["stats"]["acceptance"] == [0.84, pytest.approx(2 / 3), 0.5]
    assert well["stats"]["cache_hit_rate"] == 0.25
    assert (lost["healthy"], lost["stats"], lost["message"]) == (
        False,
        None,
        "shard 1 on node 10.0.0.2 (process 77) is lost",
    )
    assert status["nodes"] == {"10.0.0.1": "coordinator, shard 0", "10.0.0.2": "shard 1"}
    [failure] = status["failures"]
    assert (failure["code"], failure["request_id"]) == ("poison_request", HOSTILE_ID)
    assert "Hi" not in json.dumps(status["failures"])


async def test_a_drained_group_is_told_with_what_ends_it(serve: Serve) -> None:
    server = await serve(ScriptedGroup(), http_port=0)
    [group] = server.groups
    server.groups.drain(group, Drained(reason="it is drained; undrain it"))
    async with aiohttp.ClientSession() as session, session.get(_url(server, "/status.json")) as answer:
        status = await answer.json()
    assert not status["server"]["serving"]
    [told] = status["groups"]
    assert (told["takes_requests"], told["healthy"]) == (False, True)
    assert told["message"] == "it is drained; undrain it"


async def test_the_newest_failures_are_kept_and_a_client_that_leaves_is_none(serve: Serve) -> None:
    server = await serve(ScriptedGroup(lambda request: [asyncio.Event()]), http_port=0)
    async with aiohttp.ClientSession() as session:
        for number in range(25):
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 0 if number else "many"}
            headers = {"X-Request-Id": f"r-{number}"}
            async with session.post(_url(server, "/v1/completions"), json=body, headers=headers) as answer:
                assert answer.status == 400
        with pytest.raises(TimeoutError):
            await session.post(
                _url(server, "/v1/completions"),
                json={"model": "tiny", "prompt": "Hi"},
                timeout=aiohttp.ClientTimeout(total=0.3),
            )
        async with session.get(_url(server, "/status.json")) as answer:
            failures = (await answer.json())["failures"]
    assert [failure["request_id"] for failure in failures] == [f"r-{n}" for n in range(24, 4, -1)]
    assert {(failure["code"], failure["field"]) for failure in failures} == {
        ("invalid_request", "max_tokens")
    }


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Headless Chromium, driven by Selenium."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no chromium and chromedriver on this machine; Debian's packages are enough")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/c",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.mark.alone
async def test_people_can_read_it(serve: Serve, browser: Any) -> None:
    server = await served(serve)
    await asyncio.to_thread(_read_as_people_do, browser, _url(server, "/status"))
    await server.stop(drain_s=0)
    await asyncio.to_thread(_wait_for_text, browser, "state", "no answer")


def _read_as_people_do(browser: Any, url: str) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        for width, height in ((390, 844), (1280, 900)):
            _show_as(browser, scheme, width, height)
            browser.get(url)
            _wait_for_text(browser, "state", "serving")
            text = browser.find_element("tag name", "body").text
            for told in (
                "84 %, 67 %, 50 %",
                "3 running, 2 waiting",
                "12 of 64",
                "shard 1 on node 10.0.0.2 (process 77) is lost",
                "coordinator, shard 0",
                "poison_request",
                HOSTILE_ID,
            ):
                assert told in text, (told, scheme, width)
            assert "tiny" in browser.title
            root = "return document.documentElement"
            assert browser.execute_script(f"{root}.scrollWidth <= {root[7:]}.clientWidth"), (scheme, width)
            backgrounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2, "light and dark differ"
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def _show_as(browser: Any, scheme: str, width: int, height: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _wait_for_text(browser: Any, element: str, text: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda _: browser.find_element("id", element).text == text)
