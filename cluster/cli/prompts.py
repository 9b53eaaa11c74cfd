"""What `latentray generate` asks: texts from the command line or stdin, as prompts or as chats."""

import json
import sys
from typing import Any

from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import ConfigError, shown


def read_texts(arguments: list[str]) -> list[str]:
    """Errors: ConfigError where nothing was given and nobody writes to stdin."""
    if arguments and arguments != ["-"]:
        return arguments
    if not arguments and sys.stdin.isatty():
        raise ConfigError("no prompt; pass one as an argument, or write it to stdin (`echo Hello | ...`)")
    return [sys.stdin.read()]


def parse_template_kwargs(given: str | None, *, chat: bool) -> dict[str, Any] | None:
    """The value of --chat-template-kwargs. Errors: ConfigError."""
    if given is None:
        return None
    if not chat:
        raise ConfigError("chat-template-kwargs says how chats are written; pass --chat too, or leave it out")
    try:
        kwargs = json.loads(given)
    except (ValueError, RecursionError):
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f'chat-template-kwargs is {shown(given)}; it must be a JSON object such as {{"thinking": true}}'
        )
    return kwargs


def contents(
    texts: list[str], frontend: ModelFrontend, *, chat: bool, template_kwargs: dict[str, Any] | None
) -> list[str | list[int]]:
    """Each text as it is, or as a user's message in a chat of its own."""
    if not chat:
        return list(texts)
    return [
        frontend.render_chat([{"role": "user", "content": text}], chat_template_kwargs=template_kwargs)
        for text in texts
    ]
