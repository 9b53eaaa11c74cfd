"""The example of docs/batch.md in a process of its own: Ray Data's actors answer."""

import json
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_process import ROOT, environment

pytestmark = [pytest.mark.ray, pytest.mark.slow]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    [example] = BLOCK.findall((ROOT / "docs" / "batch.md").read_text())
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    show = "import json\nprint('ROWS', json.dumps(answers.take_all(), default=str))\n"
    done = subprocess.run(
        [sys.executable, "-c", example + show],
        cwd=tmp_path,
        env=environment(
            PYTHONPATH=str(ROOT),
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
            RAY_USAGE_STATS_ENABLED="0",
        ),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.partition("ROWS ")[2].splitlines()[0])
    by_name = {row["custom_id"]: row for row in rows}
    assert by_name["france"]["text"] == "The capital of France is Paris."
    assert by_name["spain"]["text"] == "The capital of Spain is Madrid."
    assert "messages" in by_name["bad"]["error"]
    assert by_name["bad"]["text"] is None
