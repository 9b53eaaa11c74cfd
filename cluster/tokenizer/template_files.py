"""Where a checkpoint keeps its chat templates."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from cluster.chat.process import TemplateProcess
from cluster.chat.template import ChatTemplate
from cluster.tokenizer.files import TEMPLATE, TEMPLATE_JSON, TOKENIZER_CONFIG, TokenizerFiles
from kernels_integration.errors import CheckpointError, kind_of

DEFAULT = "default"


def chat_templates(files: TokenizerFiles) -> dict[str, ChatTemplate]:
    """Templates by name. A file wins over another source of the same name, in this order:

    chat_template.jinja and additional_chat_templates/NAME.jinja, chat_template.json, and chat_template in
    tokenizer_config.json: one template, or a list of named ones.
    Errors: CheckpointError when a file holds something else, or is no legal Jinja.
    """
    sources: dict[str, str] = {}
    for name in (TOKENIZER_CONFIG, TEMPLATE_JSON):
        sources |= _sources_of(f"{files.folder / name}", files.object(name).get("chat_template"))
    for name, source in files.templates.items():
        if name != TEMPLATE:
            sources[PurePath(name).stem] = source
    if TEMPLATE in files.templates:
        sources[DEFAULT] = files.templates[TEMPLATE]
    process = TemplateProcess()
    return {name: ChatTemplate(source, name=name, process=process) for name, source in sources.items()}


def _sources_of(file: str, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(map(_is_named, value)):
        return {entry["name"]: entry["template"] for entry in value}
    raise CheckpointError(
        f"{file}: chat_template is {kind_of(value)} of another form; it must be text, or a list of "
        "objects with name and template"
    )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
