"""What a job is made of: its entrypoint, the files it brings, and the same as a command of Ray's."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.launch.ray_session import PACKAGES
from kernels_integration.errors import ConfigError, shown

_PATHS = {
    "-i": "--input",
    "-o": "--output",
    "--input": "--input",
    "--output": "--output",
    "--errors": "--errors",
    "--journal": "--journal",
    "--model": "--model",
    "--config": "--config",
    "--trace": "--trace",
    "--log-dir": "--log-dir",
    "--chat-template": "--chat-template",
}
_EXCLUDES = (
    *("/[!.]*", "/.?*"),  # for Ray "/*" would be the folder itself, too
    *(pattern for package in PACKAGES for pattern in (f"!/{package}", f"!/{package}/**")),
    "__pycache__",
)
"""In gitignore's language: all of the folder but our packages; data, .git and .venv stay here."""


def package_folder() -> Path:
    """What our packages lie in: a checkout, or where they are installed."""
    return Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """entrypoint: a shell's command line. runtime_env: Ray's."""

    entrypoint: str
    runtime_env: Mapping[str, Any]

    def as_command(self, address: str | None) -> str:
        """The same job submitted by Ray's own command."""
        rest = {name: value for name, value in self.runtime_env.items() if name != "working_dir"}
        words = ["ray", "job", "submit", *(() if address is None else ("--address", address))]
        words += [
            "--working-dir",
            str(self.runtime_env["working_dir"]),
            "--runtime-env-json",
            json.dumps(rest),
        ]
        return f"{shlex.join(words)} -- {self.entrypoint}"


def plan_submission(
    words: Sequence[str], *, commands: Sequence[str], python: str, root: Path, runtime_env_json: str | None
) -> Submission:
    """words: a command line of latentray's. commands: those there are. python: of the nodes. root: the folder
    that our packages lie in.

    Errors: ConfigError: no such command, paths that mean nothing on a node, a runtime_env that is none.
    """
    if not words or words[0] not in commands:
        told = shown(words[0]) if words else "nothing"
        raise ConfigError(
            f"submit is given {told} to run; pass one of {', '.join(commands)} behind --, such as: "
            "latentray submit -- batch -i /data/in.jsonl -o /data/out.jsonl"
        )
    _require_absolute(words)
    env = _parsed(runtime_env_json)
    return Submission(
        entrypoint=shlex.join([python, "-m", "cluster", *words]),
        runtime_env=env | {"working_dir": str(root), "excludes": [*_EXCLUDES, *env.get("excludes", ())]},
    )


def _require_absolute(words: Sequence[str]) -> None:
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in _PATHS:
            continue
        if not equals:
            value = words[position + 1] if position + 1 < len(words) else ""
        if _PATHS[flag] == "--input" and value == "-":
            raise ConfigError(
                f"{flag} - is stdin, which a job does not have; pass a file that the node reads"
            )
        if value and value != "-" and not value.startswith("/") and "://" not in value:
            raise ConfigError(
                f"{flag} {value} is relative, and a job runs in a folder of its own that goes with it; pass "
                "a path from / on, of a disk that the cluster's nodes share"
            )


def _parsed(runtime_env_json: str | None) -> dict[str, Any]:
    if runtime_env_json is None:
        return {}
    try:
        env = json.loads(runtime_env_json)
    except ValueError as error:
        raise ConfigError(f"--runtime-env-json is {shown(runtime_env_json)}: no JSON: {error}") from error
    if not isinstance(env, dict) or "working_dir" in env:
        raise ConfigError(
            f"--runtime-env-json is {shown(runtime_env_json)}; it must be an object, without working_dir, "
            "which is latentray's own"
        )
    return env
