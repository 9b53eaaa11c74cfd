"""The table of values in docs/kubernetes.md, out of their schema: `python -m helm.values_table` writes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from helm.values_schema import values_schema

PAGE = Path(__file__).parents[1] / "docs" / "kubernetes.md"
_VALUES = Path(__file__).parent / "latentray" / "values.yaml"
_BEGIN, _END = "<!-- values -->", "<!-- end of values -->"
_MISSING = object()


def values_table() -> str:
    """Markdown: every value with its default and what it does."""
    defaults = yaml.safe_load(_VALUES.read_text())
    schema = values_schema()
    found = _rows(schema, schema, defaults, "")
    rows = [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in found]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _rows(
    root: dict[str, Any], schema: dict[str, Any], defaults: Any, prefix: str
) -> Iterator[tuple[str, str, str]]:
    for name, inner in schema["properties"].items():
        default = defaults.get(name, _MISSING) if isinstance(defaults, dict) else _MISSING
        reference = inner.get("$ref", "").rpartition("/")[2]
        inner = root["definitions"][reference] if reference else inner
        if "properties" in inner and not reference and name not in ("config", "resources"):
            yield f"{prefix}{name}", "", inner["description"]
            yield from _rows(root, inner, default, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _shown(default), inner["description"] + _legal(inner)
            items = inner.get("items", {})
            if name == "workers":
                yield from _rows(root, items, {}, f"{prefix}{name}[].")


def _shown(default: Any) -> str:
    if default is _MISSING or default == "":
        return ""
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"


def _legal(schema: dict[str, Any]) -> str:
    return f" One of {', '.join(schema['enum'])}." if "enum" in schema else ""


def write() -> None:
    """Between the two marks of the page."""
    page = PAGE.read_text()
    before, rest = page.split(_BEGIN, 1)
    _, after = rest.split(_END, 1)
    PAGE.write_text(f"{before}{_BEGIN}\n\n{values_table()}\n{_END}{after}")


if __name__ == "__main__":
    write()
