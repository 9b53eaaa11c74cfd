"""Parts of xgrammar's structural tags. Source: structural_tag.py of xgrammar 0.2."""

from collections.abc import Sequence
from typing import Any

Format = dict[str, Any]
"""What a part of a text must look like."""


NOTHING: Format = {"type": "const_string", "value": ""}


def json_schema(schema: Any, style: str = "json") -> Format:
    return {"type": "json_schema", "json_schema": schema, "style": style}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def some_of(tags: Sequence[Format], separator: str, *, one: bool) -> Format:
    """At least one of them; one: one alone."""
    rules = {"separator": separator, "at_least_one": True, "stop_after_first": one}
    return {"type": "tags_with_separator", "tags": list(tags), **rules}
