"""Every error leaves the project by one table."""

import ast
from pathlib import Path

import grpc
import pytest

import cluster
from cluster.errors import OUTCOMES, Outcome, error_classes, from_code, outcome
from kernels_integration.errors import MAX_SHOWN, InvalidRequestError, LatentrayError, UnavailableError, shown

ROOT = Path(cluster.__file__).parent.parent
LEGAL_EXIT_CODES = {2, 3, 4, 5}


def error_classes_in_source() -> set[str]:
    """Subclasses of LatentrayError anywhere in the project, read without importing all of it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for package in ("kernels_integration", "actors", "cluster")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"LatentrayError"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def test_every_error_class_has_a_row_of_its_own() -> None:
    classes = error_classes()
    assert {cls.__name__ for cls in classes} == error_classes_in_source(), "define errors beside the others"
    # One without a code of its own is its parent to everybody outside.
    codes = [cls.code for cls in classes if "code" in vars(cls)]
    assert len(codes) == len(set(codes)), "two classes share a code"
    assert set(codes) == set(OUTCOMES)


@pytest.mark.parametrize("code", OUTCOMES)
def test_rows_are_legal_and_agree(code: str) -> None:
    row = OUTCOMES[code]
    assert row.grpc_status in grpc.StatusCode.__members__
    assert 400 <= row.http_status < 600
    assert row.exit_code in LEGAL_EXIT_CODES
    # Clients retry UNAVAILABLE and 503 elsewhere: both doors must tell them the same.
    assert (row.grpc_status == "UNAVAILABLE") == (row.http_status == 503)
    assert (row.grpc_status == "INTERNAL") == (row.exit_code == 5)


@pytest.mark.parametrize("code", OUTCOMES)
def test_a_code_comes_back_as_its_class(code: str) -> None:
    error = from_code(code, "why", field="top_p")
    assert error.code == code
    assert str(error) == "why"
    if isinstance(error, InvalidRequestError):
        assert error.field == "top_p"


def test_an_unknown_code_is_an_internal_fault() -> None:
    assert outcome("no_such_code") == Outcome("INTERNAL", 500, 5)
    assert type(from_code("no_such_code", "x")) is LatentrayError
    assert outcome(UnavailableError("x")).exit_code == 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        ([1, None], "[1, null]"),
        ({"a": True, "b": [None, {"c": (1, False)}]}, "{'a': true, 'b': [null, {'c': [1, false]}]}"),
        ([[[[[1]]]]], "[[[[[...]]]]]"),
        ({"a": {}}, "{'a': {}}"),
        ([10**6000], "[a int too large to show]"),
    ],
)
def test_values_are_shown_as_json_has_them(value: object, words: str) -> None:
    assert shown(value) == words


def test_large_and_deep_values_are_shown_by_their_ends() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[[[...]]]]]"
    for value in (list(range(10**6)), {"a": list(range(10**6))}, ["x" * 10**7], [["x"] * 1000] * 1000):
        told = shown(value)
        assert len(told) <= MAX_SHOWN + 10
        assert told.startswith(repr(value)[:50])
    assert shown(list(range(10**6))).endswith("999998, 999999]")
