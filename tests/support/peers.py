"""Programs of other projects that tests talk to, each in an environment of its own: `make setup-dev`."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def smg() -> str:
    """The SMG router's command."""
    return _command("smg", "smg")


def schemathesis() -> str:
    """The command that tests a server against its OpenAPI document."""
    return _command("clients", "schemathesis")


def python_of_clients() -> str:
    """A Python that has litellm and langchain-openai."""
    return _command("clients", "python", on_path=False)


def _command(environment: str, name: str, *, on_path: bool = True) -> str:
    """In CI its absence is a failure, elsewhere the test is skipped."""
    installed = Path(sys.prefix) / "peers" / environment / "bin" / name
    found = str(installed) if installed.exists() else shutil.which(name) if on_path else None
    if found is not None:
        return found
    reason = f"{name} of {environment} is not installed; `make setup-dev` installs it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
