"""Programs of other projects that tests talk to, each in an environment of its own: `make setup-dev`."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def smg() -> str:
    """The SMG router's command. In CI its absence is a failure, elsewhere the test is skipped."""
    installed = Path(sys.prefix) / "peers" / "smg" / "bin" / "smg"
    found = str(installed) if installed.exists() else shutil.which("smg")
    if found is not None:
        return found
    reason = "the SMG router is not installed; `make setup-dev` installs it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
