"""Answers of `latentray generate` on stdout: text as it comes, or JSON."""

import dataclasses
import json
import sys

import typer

from cluster.cli.answers import PrintableAnswer


def print_json(index: int, piece: str, answer: PrintableAnswer | None) -> None:
    """One object a line, in the order in which answers are finished."""
    if answer is not None:
        typer.echo(json.dumps({"index": index} | dataclasses.asdict(answer), ensure_ascii=False))


class AnswerPrinter:
    """Prints the answers in order: the first one as it comes, the others as soon as it is their turn."""

    def __init__(self, *, separated: bool) -> None:
        self._separated = separated
        self._turn = 0
        self._waiting: dict[int, list[str]] = {}
        self._finished: set[int] = set()

    def __call__(self, index: int, piece: str, answer: PrintableAnswer | None) -> None:
        self._waiting.setdefault(index, []).append(piece)
        if answer is not None:
            self._finished.add(index)
        while pieces := self._waiting.pop(self._turn, None):
            sys.stdout.write("".join(pieces))
            sys.stdout.flush()
            if self._turn not in self._finished:
                break
            sys.stdout.write("\n\n" if self._separated else "\n")
            sys.stdout.flush()
            self._turn += 1
