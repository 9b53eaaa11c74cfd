"""The process that tries constraints: it compiles each as a shard would, and says what came of it."""

import os
import random
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from actors.grammar.compiler import GrammarCompiler
from actors.grammar.matcher import SequenceMatcher
from actors.structured_outputs import StructuredOutputs
from cluster.bounded_worker import answer, limit_memory

_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""What xgrammar's messages begin with: the time, and the line of its source."""
_CHECK = re.compile(r"^Check failed: .*? is false: ", re.DOTALL)
_NUM_WALKS = 3
_WALK_TOKENS = 48
"""Walks along tokens that are legal: grammars are dear at once, behind many tokens, or in places."""
_MAX_WALKING_S = 1.0
"""CPU time of all tokens after which no further one is tried."""
_MAX_FIRST_S = 0.5
"""CPU time of one token, whose masks may be made for the first time."""
_MAX_TOKEN_S = 0.05
"""In the mean of the last _NUM_LAST."""
_NUM_LAST = 4
_NUM_CHECKED = 64
"""Legal tokens of a place that are tried: xgrammar 0.2.9 allows too many for [一-龥]{1,129}."""
_MAX_CHECKING_S = 0.3
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
        if problem := _Walks(compiler, constraint).problem():
            return {"error": problem}
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


class _Walks:
    """Follows legal tokens as a shard would, in as much time as a shard will take: here it may be stopped."""

    def __init__(self, compiler: GrammarCompiler, constraint: StructuredOutputs) -> None:
        self._compiler = compiler
        self._constraint = constraint
        self._spent = 0.0
        self._checking = 0.0

    def problem(self) -> str | None:
        """What is wrong with the form; None for one that a shard can follow."""
        for walk in range(_NUM_WALKS):
            if (problem := self._walk(walk)) or self._spent > _MAX_WALKING_S:
                return problem
        return None

    def _walk(self, walk: int) -> str | None:
        """The first takes the last legal token each time, which few alternatives share; the others draw."""
        rng = random.Random(f"{walk} {self._constraint.text}")
        matcher = self._compiler.matcher(self._constraint, (_END,))
        took = 0.0  # since the last masks
        last: deque[float] = deque(maxlen=_NUM_LAST)
        for num_tokens in range(_WALK_TOKENS):
            began = time.process_time()
            bits = matcher.legal(())
            took += time.process_time() - began
            if took > _MAX_FIRST_S:
                return f"a token of it takes {took:.1f} s of CPU time, which may be {_MAX_FIRST_S:g}"
            self._spent += took
            last.append(took)
            assert bits is not None, "there are no drafts"
            legal = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            if not legal:
                return None if num_tokens else "no text is of this form"
            going_on = [token for token in legal if token != _END]
            if not going_on or self._spent > _MAX_WALKING_S:
                break
            if not self._is_sound(matcher, rng.sample(going_on, min(len(going_on), _NUM_CHECKED))):
                return (
                    "xgrammar's masks of it are at odds with its parse; write shorter what is repeated more "
                    "than 128 times"
                )
            token = rng.choice(going_on) if walk else going_on[-1]
            began = time.process_time()
            matcher.advance([token])
            took = time.process_time() - began
        mean = sum(last) / len(last)
        if mean > _MAX_TOKEN_S and (num_tokens > 2 * _NUM_LAST or self._spent > _MAX_WALKING_S):
            return f"a token of it takes {mean:.2f} s of CPU time, which may be {_MAX_TOKEN_S:g} in the mean"
        return None

    def _is_sound(self, matcher: SequenceMatcher, legal: list[int]) -> bool:
        """Whether the parse goes on with what is legal by the mask, as far as there is time to see."""
        began = time.process_time()
        for token in legal:
            if self._checking > _MAX_CHECKING_S:
                break
            if not matcher.accepts(token):
                return False
            now = time.process_time()
            self._checking, began = self._checking + now - began, now
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
