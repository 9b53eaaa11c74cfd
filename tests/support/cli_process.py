"""`python -m cluster` as a user runs it: in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--max-model-len", "256", "--num-kv-blocks", "64", "--max-num-seqs", "8")


def environment(**changes: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("LATENTRAY_", "RAY_"))}
    # the default port may be taken on a machine that runs tests
    return kept | {"OMP_NUM_THREADS": "1", "LATENTRAY_HTTP_PORT": "0"} | changes


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "cluster", *argv]


def run(
    *argv: str, stdin: str = "", cwd: Path = ROOT, timeout_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv),
        input=stdin,
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def start(*argv: str) -> subprocess.Popen[str]:
    """A process that Ctrl-C reaches, also where the tests themselves run in the background of a shell."""
    return subprocess.Popen(
        command(*argv),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
