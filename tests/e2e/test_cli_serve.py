"""`latentray serve` on Ray, with the other commands as its clients."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cli_process import SMALL, run, start

pytestmark = [pytest.mark.e2e, pytest.mark.ray]


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    process = start(
        "serve", "--address", "local", "--port", "0", "-tp", "2", "-dcp", "2", "--dtype", "float64", *SMALL
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"serving tiny-dsa at (\S+) \(tp 2, dcp 2, 3 drafts", line)
        assert match, line + (process.communicate(timeout=30)[1] if process.poll() is not None else "")
        line = process.stdout.readline()
        assert re.search(r"memory: coordinator \d+M, shard 0 \d+M, shard 1 \d+M; a shard grows", line), line
        yield Served(process, match[1])
    finally:
        process.terminate()
        try:
            process.wait(40)
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    """Processes started by a process, and by those."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # it has ended meanwhile
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def test_status_tells_that_it_serves(served: Served) -> None:
    done = run("status", "--server", served.address, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["health"]["healthy"]
    assert status["model"]["served_model_name"] == "tiny-dsa"
    assert status["model"]["max_model_len"] == 256
    assert status["engine"]["block_size"] == 16
    assert len(status["groups"]) == 1
    table = run("status", "--server", served.address)
    assert f"{served.address}: serving" in table.stdout
    [(node, actors)] = status["engine"]["actors_by_node"].items()
    assert actors == f"coordinator, gateway at {served.address}, shards 0-1"
    assert re.search(rf"^{re.escape(node)} +{re.escape(actors)}$", table.stdout, re.MULTILINE)


def test_generate_asks_the_server(served: Served) -> None:
    done = run(
        "generate",
        "--server",
        served.address,
        "--chat",
        "--temperature",
        "0",
        "What is the capital of France?",
    )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr


def test_a_server_and_an_engine_of_ones_own_write_the_same(served: Served) -> None:
    flags = ("generate", "--seed", "5", "--max-tokens", "40", "--json", "The king", "A dog")
    remote = run(*flags, "--server", served.address)
    local = run(*flags, "--dtype", "float64", *SMALL)
    assert remote.returncode == local.returncode == 0, remote.stderr + local.stderr
    by_index = [
        {a["index"]: a for a in map(json.loads, done.stdout.splitlines())} for done in (remote, local)
    ]
    assert by_index[0] == by_index[1]


def test_a_server_and_an_engine_of_ones_own_tell_the_same_log_probabilities(served: Served) -> None:
    flags = (
        *("generate", "--temperature", "0", "--max-tokens", "4", "--json", "The king"),
        *("--logprobs", "2", "--prompt-logprobs", "1", "--logit-bias", '{"5": -100}'),
    )
    remote = run(*flags, "--server", served.address)
    local = run(*flags, "--dtype", "float64", *SMALL)
    assert remote.returncode == local.returncode == 0, remote.stderr + local.stderr
    one, other = (json.loads(done.stdout) for done in (remote, local))
    assert len(one["logprobs"]) == len(one["token_ids"]) == 4
    assert one["prompt_logprobs"][0] is None
    assert len(one["prompt_logprobs"]) == one["num_prompt_tokens"]
    for name in ("logprobs", "prompt_logprobs"):
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert (mine is None) == (theirs is None)
            assert list(mine or {}) == list(theirs or {})
            assert list((mine or {}).values()) == pytest.approx(list((theirs or {}).values()), abs=1e-4)
    for tokens, token_id in zip(one["logprobs"], one["token_ids"], strict=True):
        assert next(iter(tokens)) == str(token_id)


def test_the_default_length_ends_at_the_context(served: Served) -> None:
    ids_left = 6
    prompt = "word " * (256 - ids_left - 1)  # and the beginning of text
    flags = ("generate", "--temperature", "0", "--json", "--ignore-eos", prompt)
    for where in (("--server", served.address), SMALL):
        done = run(*flags, *where)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["num_prompt_tokens"] + len(answer["token_ids"]) == 256
        assert answer["finish_reason"] == "length"
        refused = run(*flags, "--max-tokens", "100", *where)
        assert refused.returncode == 2
        assert "max_tokens is 100; the prompt has" in refused.stderr


def test_the_servers_refusal_is_exit_code_2(served: Served) -> None:
    done = run("generate", "--server", served.address, "word " * 300)
    assert done.returncode == 2
    assert "256" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_is_taken(served: Served) -> None:
    port = served.address.rsplit(":", 1)[1]
    done = run("serve", "--port", port, timeout_s=30)
    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in done.stderr


def test_what_was_served_can_be_read_in_the_logs(served: Served) -> None:
    [folder] = (Path(os.environ["XDG_STATE_HOME"]) / "latentray" / "logs").glob(f"*-{served.process.pid}")
    assert {path.name for path in folder.iterdir()} == {
        "gateway.log",
        "coordinator.log",
        "shard-0.log",
        "shard-1.log",
    }
    done = run("generate", "--server", served.address, "--max-tokens", "5", "A secret")
    assert done.returncode == 0, done.stderr
    log = (folder / "gateway.log").read_text()
    line = (
        r" INFO gateway: id=\S+ finish=\S+ prompt_tokens=\d+ cached_tokens=\d+ completion_tokens=5 .*total_s="
    )
    assert re.search(line, log.splitlines()[-1]), log
    assert "secret" not in log


def test_a_signal_lets_the_live_request_end_and_leaves_no_process(served: Served) -> None:
    """The last test of this server."""
    pid = served.process.pid
    children = descendants(pid)
    assert len(children) > 3
    answer: list[subprocess.CompletedProcess[str]] = []
    flags = (
        "generate",
        "--server",
        served.address,
        "--json",
        "--ignore-eos",
        "--max-tokens",
        "230",
        "The king",
    )
    asker = threading.Thread(target=lambda: answer.append(run(*flags)))
    asker.start()
    for _ in range(600):
        status = json.loads(run("status", "--server", served.address, "--json").stdout)
        if status["engine"]["active_requests"]:
            break
        assert asker.is_alive(), "the request ended before it was seen"
    served.process.send_signal(signal.SIGINT)
    _, errors = served.process.communicate(timeout=60)
    asker.join(60)
    assert answer[0].returncode == 0, answer[0].stderr
    assert json.loads(answer[0].stdout)["finish_reason"] == "length"
    assert served.process.returncode == 0
    assert "stopping" in errors
    assert "Traceback" not in errors
    assert "waiting for" in errors, "what is waited for is visible while it starts"
    left = [child for child in children if Path(f"/proc/{child}").exists()]
    assert left == []


def test_a_lost_gateway_that_may_have_no_successor_ends_the_server() -> None:
    """Nobody else could tell clients and probes."""
    process = start("serve", "--address", "local", "--port", "0", "--max-restarts", "0", *SMALL)
    try:
        assert process.stdout is not None
        assert "serving tiny-dsa" in process.stdout.readline()
        children = descendants(process.pid)
        [gateway] = [c for c in children if b"GatewayActor" in Path(f"/proc/{c}/cmdline").read_bytes()]
        os.kill(gateway, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 4
    told = rf"not serving: gateway on node \S+ \(process {gateway}\) is lost: it was killed by SIGKILL"
    assert re.search(told, errors)
    assert "Traceback" not in errors
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
