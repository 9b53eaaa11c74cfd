"""Plain tables on stdout: readable at a terminal and in a pipe."""

from collections.abc import Sequence

import typer


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Left-aligned columns; None is shown as a dash."""
    cells = [tuple(header), *(tuple("-" if cell is None else str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
