"""Where a checkpoint keeps its chat templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.tokenizer.chat_template import ChatTemplate
from cluster.tokenizer.json_files import read_json_object
from kernels_integration.errors import CheckpointError, ConfigError

DEFAULT = "default"


def checkpoint_templates(directory: Path) -> dict[str, ChatTemplate]:
    """Templates by name. A file wins over another source of the same name, in this order:

    chat_template.jinja and additional_chat_templates/NAME.jinja, chat_template.json, and chat_template in
    tokenizer_config.json: one template, or a list of named ones.
    Errors: CheckpointError when a file cannot be read, holds something else, or is no legal Jinja.
    """
    sources: dict[str, str] = {}
    for file in (directory / "tokenizer_config.json", directory / "chat_template.json"):
        sources |= _sources_of(file, read_json_object(file).get("chat_template"))
    for file in sorted(directory.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = _read(file)
    if (file := directory / "chat_template.jinja").is_file():
        sources[DEFAULT] = _read(file)
    return {name: ChatTemplate(source, name=name) for name, source in sources.items()}


def given_template(file: str | Path) -> ChatTemplate:
    """The template of --chat-template. Errors: ConfigError."""
    try:
        return ChatTemplate(_read(Path(file)), name=DEFAULT)
    except CheckpointError as error:
        raise ConfigError(
            f"chat-template {file}: {error}; it must be a file that holds a Jinja template"
        ) from error


def _sources_of(file: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(map(_is_named, value)):
        return {entry["name"]: entry["template"] for entry in value}
    raise CheckpointError(
        f"{file}: chat_template is a {type(value).__name__} of another form; it must be text, or a list of "
        "objects with name and template"
    )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
