"""The process that tries constraints: it compiles each as a shard would, and says what came of it."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from actors.grammar.compiler import GrammarCompiler
from actors.structured_outputs import StructuredOutputs
from cluster.bounded_worker import answer, limit_memory

_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""What xgrammar's messages begin with: the time, and the line of its source."""
_CHECK = re.compile(r"^Check failed: .*? is false: ", re.DOTALL)
_NUM_TRIED = 4
"""Tokens: where many alternatives begin alike, their number tells behind the first."""
_END = 0
"""Any token stands for the end of text here."""
_WARNING = re.compile(r"^\[[\d:]+\] \S+: Warning: (.*)$", re.MULTILINE)


def main(model_path: str, vocab_size: int, cpu_s: float, memory_bytes: int, max_compiled_bytes: int) -> None:
    """Answer until stdin ends."""
    compiler = GrammarCompiler(model_path, vocab_size)
    compiler.compile(StructuredOutputs("json_object"))  # imports, vocabulary: before anything is limited
    limit_memory(memory_bytes, beyond_present=True)
    answer(
        partial(_trial, compiler=compiler, max_compiled_bytes=max_compiled_bytes),
        seconds=cpu_s,
        counts_cpu=True,
    )


def _trial(question: dict[str, Any], *, compiler: GrammarCompiler, max_compiled_bytes: int) -> dict[str, Any]:
    """{"error": what is wrong, or None}."""
    try:
        constraint = StructuredOutputs(question["kind"], question["text"])
        with _standard_error() as written:
            compiled = compiler.compile(constraint)
        if not _has_a_beginning(compiler, constraint):
            return {"error": "no text is of this form"}
        num_bytes = compiled.memory_size_bytes
    except MemoryError:
        return {"error": "it needs too much memory to compile"}
    except Exception as error:  # xgrammar's own are RuntimeErrors, those of its binding several kinds
        return {"error": _words(str(error)) or type(error).__name__}
    if num_bytes > max_compiled_bytes:
        return {"error": f"compiled it has {num_bytes} bytes, which may be {max_compiled_bytes}"}
    # A warning says that something of a schema is passed over.
    warning = _WARNING.search(written[0])
    return {"error": warning[1] if warning else None}


def _has_a_beginning(compiler: GrammarCompiler, constraint: StructuredOutputs) -> bool:
    """Make the masks of the first tokens, which takes what it will take a shard: here it may be stopped."""
    matcher = compiler.matcher(constraint, (_END,))
    for num_tokens in range(_NUM_TRIED):
        bits = matcher.legal(())
        assert bits is not None, "there are no drafts"
        legal = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if not legal:
            return num_tokens > 0
        token = legal[-1]
        if token == _END:  # nothing but the end: the form is complete
            return True
        matcher.advance([token])
    return True


def _words(message: str) -> str:
    return _CHECK.sub("", _PLACE.sub("", message.strip())).strip()


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """What is written to file descriptor 2 meanwhile: where xgrammar's warnings go."""
    written: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            written.append(file.read().decode("utf-8", "replace"))
