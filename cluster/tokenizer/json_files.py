"""JSON files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from kernels_integration.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """The file's object, empty where there is no such file. Errors: CheckpointError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}; it must hold one JSON object")
    return content
