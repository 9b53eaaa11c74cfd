"""Ctrl-C, SIGTERM and SIGHUP, to a command or to its process group, while it starts and while it works.

The same for each: an exit code that says which signal it was, no word but our own, and nothing left.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.launch.ray_keeper import descendants
from tests.support.cli_process import ROOT, SMALL, command, environment

pytestmark = [pytest.mark.e2e, pytest.mark.ray]

LLM_SCRIPT = """
import sys
from cluster.llm import LLM
from actors.sampling_params import SamplingParams
def say(text):
    print(text, file=sys.stderr, flush=True)
llm = LLM(address="local", max_model_len=256, num_kv_blocks=64, progress=say)
print("loaded", flush=True)
while True:
    llm.generate("The king", SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
"""
LONG = ("--ignore-eos", "--max-tokens", "240", "The king", *["A dog"] * 60)
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "generate inline": lambda _: command("generate", *SMALL, *LONG),
    "generate ray": lambda _: command("generate", "--executor", "ray", "--address", "local", *SMALL, *LONG),
    "batch": lambda folder: command(
        "batch", "--address", "local", *SMALL, "-i", _rows(folder), "-o", str(folder / "out.jsonl")
    ),
    "serve": lambda _: command("serve", "--address", "local", "--port", "0", *SMALL),
    "demo": lambda _: command("demo", "--address", "local", *SMALL),
    "bench": lambda _: command(
        "bench", "--address", "local", "--no-reference", "--batch-sizes", "1", "--output-len", "100"
    ),
    "LLM": lambda _: [sys.executable, "-c", LLM_SCRIPT],
}
WORKS: dict[str, str] = {
    "serve": "serving tiny-dsa",
    "LLM": "loaded",
    "generate ray": "",
    "generate inline": "",
}
"""What a command prints when it works, by itself; the others are given a moment after loading."""
PHASES = ("Ray", "load", "work")
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
CASES = [
    (name, phase, number, to)
    for name in COMMANDS
    for phase in PHASES
    for number in SIGNALS
    for to in ("pid", "group")
    if not (name == "generate inline" and phase == "Ray")
]
NOISE = re.compile(
    r"Traceback|SIGABRT|Fatal Python|\*\*\* |core_worker|raylet|gcs_|Aborted|Exception ignored|\(pid=",
    re.ASCII,
)


def _rows(folder: Path) -> str:
    body = {"model": "tiny-dsa", "prompt": "The king", "max_tokens": 200, "ignore_eos": True}
    path = folder / "in.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            for i in range(500)
        )
    )
    return str(path)


class Watched:
    """A command in a process group of its own; what it writes is collected as it comes."""

    def __init__(self, argv: list[str]) -> None:
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._start_s = time.monotonic()
        self.first_word_s = 0.0
        """How long it took to say something: as slow as the machine is now."""
        self.out, self.err = b"", b""
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in ("out", "err")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        while data := os.read(stream.fileno(), 65536):
            self.first_word_s = self.first_word_s or time.monotonic() - self._start_s
            setattr(self, name, getattr(self, name) + data)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, (self.process.returncode, self.err.decode())
            assert time.monotonic() < deadline_s, self.err.decode()
            time.sleep(0.01)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()


def wait_until_in(phase: str, name: str, run: Watched) -> None:
    if phase == "Ray":
        run.wait_for(lambda: b"waiting for Ray" in run.err)
    elif name == "generate inline":
        run.wait_for(lambda: b"loading the model" in run.err)
    else:
        run.wait_for(lambda: b"shards to load" in run.err or b"shard to load" in run.err)
    if phase == "work":
        if name in WORKS:
            run.wait_for(lambda: run.out and WORKS[name] in run.out.decode(errors="replace"))
        else:
            time.sleep(4)


@pytest.mark.slow
@pytest.mark.product(4)
@pytest.mark.parametrize(("name", "phase", "number", "to"), CASES, ids=["-".join(case) for case in CASES])
def test_a_signal_ends_a_command_cleanly(tmp_path: Path, name: str, phase: str, number: str, to: str) -> None:
    run = Watched(COMMANDS[name](tmp_path))
    try:
        wait_until_in(phase, name, run)
        children = descendants(run.process.pid)
        folders = {
            part
            for child in children
            for part in Path(f"/proc/{child}/cmdline").read_text(errors="replace").split("\0")
            if re.fullmatch(r"/tmp/latentray-\w+", part)
        }
        send = os.kill if to == "pid" else os.killpg
        send(run.process.pid, SIGNALS[number])
        start_s = time.monotonic()
        code = run.process.wait(60)
        took_s = time.monotonic() - start_s
    finally:
        run.end()
    errors = run.err.decode(errors="replace")
    expected = 128 + SIGNALS[number]
    if name == "serve" and phase == "work":
        expected = 0  # the signal asks it to drain and end, which it does
    if name == "LLM":
        # A program of the user's own: Python answers Ctrl-C with a traceback, SIGTERM ends it.
        expected = -SIGNALS[number]
        errors = errors[: errors.index("Traceback")] if "KeyboardInterrupt" in errors else errors
    assert code == expected, errors
    assert not NOISE.search(errors), errors
    # One second at most where the machine has nothing else to do. To import what a command needs takes a
    # quarter of it and more, and grows with whatever else the machine does: so does this bound.
    assert took_s < 1 + 2 * run.first_word_s, (took_s, run.first_word_s)
    deadline_s = time.monotonic() + 5  # after SIGTERM to a program without a handler the keeper ends Ray
    while left := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)
    assert [folder for folder in folders if Path(folder).exists()] == []
    assert [path for folder in folders for path in Path("/dev/shm").glob(f"{Path(folder).name}-*")] == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_modules_are_imported_ends_a_command_without_a_word(number: str) -> None:
    run = Watched(command("generate", "The king"))
    try:
        maps = Path(f"/proc/{run.process.pid}/maps")
        run.wait_for(lambda: "_pydantic_core" in maps.read_text())  # imported early, with much still to come
        run.process.send_signal(SIGNALS[number])
        assert run.process.wait(30) == 128 + SIGNALS[number]
    finally:
        run.end()
    assert (run.out, run.err) == (b"", b"")
