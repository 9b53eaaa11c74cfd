"""Errors of regexes at the places where their authors see them.

xgrammar makes EBNF of a regex, and tells places in that, which nobody wrote.
Python's reader of regexes knows the same mistakes, and their places.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from actors.structured_outputs import StructuredOutputs

_EBNF = re.compile(r"^EBNF \w+ error at line \d+, column \d+: ")


def in_terms_of_regex(constraint: StructuredOutputs, error: str) -> str:
    """xgrammar's error, unless it speaks of a place in what it made of the constraint's regexes."""
    if constraint.kind == "grammar" or not _EBNF.match(error):
        return error
    for pattern in _regexes(constraint):
        if problem := _mistake(pattern):
            return f"the regex {_excerpt(pattern)!r}: {problem}"
    return _EBNF.sub("", error)


def _mistake(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        place = "" if error.pos is None else f" at position {error.pos + 1}"
        return f"{error.msg}{place}"
    except (RecursionError, OverflowError):
        return None
    return None


def _regexes(constraint: StructuredOutputs) -> Iterator[str]:
    """All that it holds. Few others are found with them: values of `const` and `default` that look alike."""
    if constraint.kind == "regex":
        yield constraint.text
        return
    pending: list[Any] = [json.loads(constraint.text or "null")]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                yield node["pattern"]
            if isinstance(node.get("patternProperties"), dict):
                yield from node["patternProperties"]
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _excerpt(pattern: str) -> str:
    return pattern if len(pattern) <= 60 else pattern[:57] + "..."
