"""Plain tables on stdout: readable at a terminal and in a pipe."""

import json
from collections.abc import Sequence

import typer


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns."""
    cells = [tuple(header), *(tuple(map(in_words, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def in_words(value: object) -> str:
    """A value as people write it: "none" for None and for nothing in a list, lists as in JSON, few digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ((), [], {}):
        return "none"
    if isinstance(value, tuple | list):
        plain = all(isinstance(entry, str | int | float) for entry in value)
        return ", ".join(map(in_words, value)) if plain else json.dumps(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(entry)}" for name, entry in value.items())
    if isinstance(value, float):
        return str(round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}"))
    return str(value)
