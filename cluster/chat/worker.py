"""The process that renders templates."""

import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jinja2

from cluster.bounded_worker import answer, limit_memory
from cluster.chat.kept import first_dropped
from cluster.chat.sandbox import TemplateSandbox
from cluster.chat.values import template_message
from kernels_integration.errors import InvalidRequestError, shortened

_MAX_TEMPLATES = 16


def main(seconds: float, memory_bytes: int, characters: int) -> None:
    """Answer until stdin ends."""
    limit_memory(memory_bytes)
    compute = partial(_answer, memory_bytes=memory_bytes, max_characters=characters)
    answer(compute, seconds=seconds)


def _answer(request: Mapping[str, Any], memory_bytes: int, max_characters: int) -> dict[str, Any]:
    """{"prompt", "dropped"}, or {"error", "field"}, or {"limit"}: what was too much; without messages the
    template is only compiled.
    """
    try:
        template = _compiled(request["source"])
        if "messages" not in request:
            return {}
        return _rendered(template, request["messages"], request["variables"], max_characters)
    except InvalidRequestError as error:
        return {"error": str(error), "field": error.field}
    except jinja2.TemplateError as error:
        return {"error": f"{_ENTRY}{_words(error)}", "field": "messages"}
    except MemoryError:
        return {"limit": f"it takes more memory than the {memory_bytes} bytes of its process"}
    except RecursionError:
        return {"limit": f"what it calls or holds is nested deeper than {sys.getrecursionlimit()} levels"}
    except SyntaxError as error:  # Jinja's own is a TemplateError: this is what Jinja made of it
        return {"limit": f"what it becomes in Python cannot be compiled: {_words(error)}"}
    except Exception as error:  # a template can raise whatever Python's operators and methods do
        return {"error": f"{_ENTRY}{type(error).__name__}: {_words(error)}", "field": "messages"}


_ENTRY = "messages do not fit the model's chat template: "


def _words(error: Exception) -> str:
    try:
        return shortened(str(error)).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return type(error).__name__


@lru_cache(_MAX_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return TemplateSandbox().from_string(source)


def _rendered(
    template: jinja2.Template, messages: list[Any], variables: Mapping[str, Any], max_characters: int
) -> dict[str, Any]:
    def render(chat: Any, tools: Any) -> str:
        known = {
            "messages": [template_message(i, message) for i, message in enumerate(chat)],
            "tools": tools,
        }
        return template.render({**variables, **known})

    prompt = render(messages, variables["tools"])
    if len(prompt) > max_characters:
        raise jinja2.TemplateError(f"the prompt has more than {max_characters} characters")
    dropped = first_dropped(prompt, messages, variables["tools"], render)
    told = None if dropped is None else {"described": dropped.described, "field": dropped.field}
    return {"prompt": prompt, "dropped": told}
