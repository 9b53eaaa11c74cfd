"""Whether a constraint can be enforced, asked of a process of its own before the request goes on.

A grammar is a program by a stranger, too: what compiles for ever, or into gigabytes, ends with that process.
"""

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.structured_outputs import StructuredOutputs
from cluster.bounded_process import BoundedProcess, is_out_of_time
from cluster.frontend.json_schema import passed_over
from cluster.frontend.regex_errors import in_terms_of_regex
from kernels_integration.errors import InvalidRequestError, shortened

TRIAL_CPU_S = 2.0
"""That compiling and the first masks may take; then the process that does it ends."""
MEMORY_BYTES = 2**30
"""That compiling may take."""
MAX_COMPILED_BYTES = 2**24
KEPT_CHARACTERS = 2**24
"""Of constraints whose result is remembered."""
FIELD = "structured_outputs"


class GrammarCheck:
    """Refuses what shards could not compile. For any number of threads; the first question takes seconds."""

    def __init__(self, model_path: str | Path, vocab_size: int) -> None:
        self._process = BoundedProcess(
            "cluster.frontend.grammar_worker",
            (str(model_path), vocab_size, TRIAL_CPU_S, MEMORY_BYTES, MAX_COMPILED_BYTES),
            purpose="to compile grammars",
        )
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, str | None] = OrderedDict()
        """The reason of a refusal, or None. The last used one stands last."""

    def require_enforceable(self, constraint: StructuredOutputs) -> None:
        """Errors: InvalidRequestError with the reason; without xgrammar with the command that installs it."""
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequestError(
                f"{FIELD} needs xgrammar, which is not installed here; install it by "
                "pip install 'latentray[grammar]', or leave it out",
                field=FIELD,
            )
        problem = self._problem_of(constraint)
        if problem is not None:
            raise InvalidRequestError(
                f"{FIELD} holds a {constraint.kind} that cannot be enforced: {problem}", field=FIELD
            )

    def close(self) -> None:
        self._process.close()

    def _problem_of(self, constraint: StructuredOutputs) -> str | None:
        with self._lock:
            if constraint in self._known:
                self._known.move_to_end(constraint)
                return self._known[constraint]
        problem = _by_words(constraint)
        problem = self._by_trial(constraint) if problem is None else problem
        with self._lock:
            self._known[constraint] = problem
            while sum(len(known.text) for known in self._known) > KEPT_CHARACTERS:
                self._known.popitem(last=False)
        return problem

    def _by_trial(self, constraint: StructuredOutputs) -> str | None:
        answer = self._process.ask({"kind": constraint.kind, "text": constraint.text})
        if not isinstance(answer, int):
            error: str | None = answer["error"]
            return None if error is None else shortened(in_terms_of_regex(constraint, error))
        if is_out_of_time(answer):
            return f"it takes more than {TRIAL_CPU_S:g} s of CPU time to compile and to try"
        return f"the process that compiled it ended (exit code {answer}), which may take {MEMORY_BYTES} bytes"


def _by_words(constraint: StructuredOutputs) -> str | None:
    """What xgrammar would pass over in silence."""
    if constraint.kind == "json":
        return passed_over(json.loads(constraint.text))
    if constraint.kind == "structural_tag":
        for schema in _schemas_inside(json.loads(constraint.text)):
            if problem := passed_over(schema):
                return problem
    return None


def _schemas_inside(tag: Any) -> Iterator[Any]:
    pending = [tag]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if "json_schema" in node:
                yield node["json_schema"]
            pending += [child for name, child in node.items() if name != "json_schema"]
        elif isinstance(node, list):
            pending += node
