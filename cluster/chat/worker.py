"""The process that renders templates: requests from stdin, answers to stdout, limits from the command line.

A frame is a length of four bytes and that many bytes of JSON. Nothing is trusted to end by itself: an alarm
kills the process that renders for too long, and the system refuses it more memory than the limit.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2

from cluster.chat.kept import first_dropped
from cluster.chat.sandbox import TemplateSandbox
from cluster.chat.values import template_message
from kernels_integration.errors import InvalidRequestError, shortened

_MAX_TEMPLATES = 16
LENGTH_BYTES = 4


def main(seconds: float, memory_bytes: int, characters: int) -> None:
    """Answer until stdin ends."""
    _limit_memory(memory_bytes)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM has no handler here: it kills
        answer = _answer(request, characters)
        signal.setitimer(signal.ITIMER_REAL, 0)
        body = json.dumps(answer).encode()
        answers.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        answers.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    request: dict[str, Any] = json.loads(stream.read(int.from_bytes(length, "little")))
    return request


def _limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # systems that have no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _answer(request: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    """{"prompt", "dropped"}, or {"error", "field"}; without messages the template is only compiled."""
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
        return {"error": f"{_ENTRY}it needs too much memory", "field": "messages"}
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
