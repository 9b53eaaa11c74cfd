"""README's commands work: `bash` and `python` blocks are run, `console` lines are parsed.

`sh` blocks (make) are what CI itself calls; `console` blocks need a cluster of machines, so only their
flags are checked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())


def _blocks(language: str) -> list[str]:
    return [body for found, body in BLOCKS if found == language]


def _environment() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LATENTRAY_")}
    return environment | {"PATH": f"{bin_folder}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.e2e
@pytest.mark.ray
@pytest.mark.parametrize("block", _blocks("bash"), ids=lambda block: block.split("\n")[0][:40])
def test_bash_blocks_run(block, tmp_path):
    output = _run(["bash", "-euo", "pipefail", "-m", "-c", block], tmp_path)
    if "capital of France" in block and "batch" not in block:
        assert "Paris" in output
    if "status" in block:
        assert "enjoying or showing" in output
    if "batch -i" in block:
        answers = (tmp_path / "answers.jsonl").read_text()
        assert "Paris" in answers
        assert answers.count("custom_id") == 2


@pytest.mark.e2e
@pytest.mark.parametrize("block", _blocks("python"))
def test_python_blocks_run(block, tmp_path):
    assert "drafts accepted" in _run([sys.executable, "-c", block], tmp_path)


def test_console_lines_use_flags_that_exist():
    """Of commands of ours; `submit` has its own flags before --, and those of another command behind it."""
    lines = [line[2:] for block in _blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    parts = []
    for line in lines:
        if line.startswith("latentray "):
            parts += [(line, part.split()) for part in line.removeprefix("latentray ").split(" -- ")]
        elif "-m cluster " in line:
            parts.append((line, line.partition("-m cluster ")[2].split()))
    assert {words[0] for _, words in parts} >= {"serve", "batch", "submit"}
    for line, (command, *words) in parts:
        usage = _run(["latentray", command, "--help"], ROOT)
        for flag in [word for word in words if word.startswith("-")]:
            assert re.search(rf"(^|[\s,]){re.escape(flag)}\b", usage, re.MULTILINE), (flag, line)


def test_every_file_that_readme_links_to_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make ([a-z-]+)", "\n".join(_blocks("sh")), re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
