"""Where chat templates run: no attributes of Python's own, and an end to loops and growing text.

The bounds catch what templates do by mistake or by simple malice. A template can still use up memory through
filters and methods of strings; it is a file of the checkpoint, like the weights: no request brings one along.
"""

import re
import time
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.tokenizer.template_values import NO_CONTENT

MAX_LOOP_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_CHARACTERS = 2**24
"""Of the prompt, and of any text or list that an operator makes."""
_MAX_BITS = 4096
"""Of the numbers that * and ** make."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
"""A % format that pads to thousands of characters, or to as many as its values say."""


class Budget:
    """Loop steps and time of one rendering."""

    __slots__ = ("_deadline_s", "_steps")

    _NAME = "loop budget"
    """With a space, so that no template can name it."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline_s = time.monotonic() + MAX_SECONDS

    @classmethod
    def variable(cls) -> dict[str, Any]:
        """A fresh budget, to be among the variables of a rendering."""
        return {cls._NAME: cls()}

    @classmethod
    def of(cls, context: Context) -> "Budget":
        budget = context.resolve(cls._NAME)
        assert isinstance(budget, cls)
        return budget

    def count_step(self) -> None:
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise SecurityError(f"more than {MAX_LOOP_STEPS} loop steps")
        if time.monotonic() > self._deadline_s:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja in the dialect of transformers."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        self.tests["none"] = _is_none

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError(f"the format {left!r} may become too long")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, type(left)):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """How generated code joins output and captured blocks."""
        parts = []
        length = 0
        for piece in pieces:
            parts.append(piece)
            length += len(piece)
            _check_length(length)
        return "".join(parts)

    @staticmethod
    def join(*values: Any) -> str:
        """The operator ~."""
        return TemplateSandbox.concat(map(str, values))

    @staticmethod
    def count_step(context: Context) -> bool:
        """Called at the head of every loop's body, and where a loop chooses its members."""
        Budget.of(context).count_step()
        return True

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_count_step()).set_lineno(loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(_count_step(), loop.test).set_lineno(loop.lineno)
        _replace_concat(template)
        template.set_environment(self)
        return template


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _is_none(value: object) -> bool:
    return value is None or value is NO_CONTENT


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """A call of the sandbox's own method, which a template cannot name or shadow."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _count_step() -> nodes.Call:
    return _call("count_step", [nodes.ContextReference()])


def _replace_concat(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        members = value if isinstance(value, list) else [value]
        changed = [
            _call("join", child.nodes).set_lineno(child.lineno) if isinstance(child, nodes.Concat) else child
            for child in members
        ]
        setattr(node, field, changed if isinstance(value, list) else changed[0])
    for child in node.iter_child_nodes():
        _replace_concat(child)


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int | float) and isinstance(right, int | float):
        bits = left.bit_length() if isinstance(left, int) else 64
        other = right.bit_length() if isinstance(right, int) else 64
        size = bits * right if operator == "**" and isinstance(right, int) else bits + other
        if size > _MAX_BITS:
            raise SecurityError(f"the result of {operator} would be too large a number")
        return
    for text, times in ((left, right), (right, left)):
        if isinstance(text, str | list | tuple) and isinstance(times, int):
            _check_length(len(text) * times)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"more than {MAX_CHARACTERS} characters")
