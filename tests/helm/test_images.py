"""docker/: what can be known without a build. Files, pins, users, and that the commands parse."""

import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from cluster.cli.app import app
from tests.support.chart import CHART, ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def instructions(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return list(_instructions(request.param))


def _instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Name and rest of each, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.strip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, rest = line.split(None, 1)
            yield name, rest


def _of(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for found, rest in instructions if found == name]


def test_there_is_one_for_each_accelerator() -> None:
    assert [file.stem for file in FILES] == ["cpu", "cuda", "rocm"]


def test_copied_files_exist_and_are_sent_to_the_builder(instructions: list[tuple[str, str]]) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [s for rest in _of(instructions, "COPY") if "--from" not in rest for s in rest.split()[:-1]]
    assert {"pyproject.toml", "cluster", "actors", "kernels_integration"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in sent), source
    assert set(sources) == set(sent)


def test_what_the_package_is_made_of_is_copied(instructions: list[tuple[str, str]]) -> None:
    copied = {s for rest in _of(instructions, "COPY") for s in rest.split()[:-1]}
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied


def test_versions_are_pinned(instructions: list[tuple[str, str]]) -> None:
    [python] = {a.partition("=")[2] for a in _of(instructions, "ARG") if a.startswith("PYTHON=")}
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+", python)
    assert python.partition("-")[0] in SpecifierSet(PROJECT["requires-python"])
    assert all(rest.split()[0] == "python:${PYTHON}" for rest in _of(instructions, "FROM"))
    installs = [rest for rest in _of(instructions, "RUN") if "pip install" in rest]
    assert len(installs) == 3
    for install in installs:
        assert "constraints-cpu.txt" in install
        assert "--no-cache-dir" in install
        for folder in re.findall(r"/install/lib/(python[\d.]+)/", install):
            assert folder == "python" + python.rpartition(".")[0]
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints-cpu.txt").read_text(), re.MULTILINE)


def test_extras_exist(instructions: list[tuple[str, str]]) -> None:
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", " ".join(_of(instructions, "RUN")))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_nobody_is_root_and_nothing_is_left_over(instructions: list[tuple[str, str]]) -> None:
    last = max(place for place, (name, _) in enumerate(instructions) if name == "FROM")
    final = instructions[last:]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert _of(final, "USER") == [str(values["podSecurity"]["runAsUser"])]
    assert [name for name, _ in instructions].count("ADD") == 0
    for command in _of(instructions, "RUN"):
        if "apt-get install" in command:
            assert "--no-install-recommends" in command
            assert command.endswith("rm -rf /var/lib/apt/lists/*")


def test_the_command_parses(instructions: list[tuple[str, str]]) -> None:
    [entry], [arguments] = _of(instructions, "ENTRYPOINT"), _of(instructions, "CMD")
    assert json.loads(entry) == list(PROJECT["scripts"])
    result = CliRunner().invoke(app, [*json.loads(arguments), "--help"])
    assert result.exit_code == 0, result.output
    known = set(re.findall(r"--[a-z-]+", result.output))
    assert {word for word in json.loads(arguments) if word.startswith("--")} <= known


def test_ports_are_the_charts(instructions: list[tuple[str, str]]) -> None:
    config = yaml.safe_load((CHART / "values.yaml").read_text())["config"]
    [ports] = _of(instructions, "EXPOSE")
    assert ports.split() == [str(config[key]) for key in ("port", "http-port", "metrics-port")]
