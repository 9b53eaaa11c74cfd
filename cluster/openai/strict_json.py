"""JSON as RFC 8259 has it, without what readers disagree about: names that an object holds twice, NaN."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from kernels_integration.errors import InvalidRequestError, kind_of, shortened, shown


def json_object(text: str | bytes, *, what: str, field: str) -> dict[str, Any]:
    """The one object that the text holds. what, field: of the text, in messages.

    Errors: InvalidRequestError; a name that stands twice in an object is told with its path.
    """
    twice: list[tuple[dict[str, Any], str]] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice.append((found, counts.most_common(1)[0][0]))
        return found

    try:
        value = json.loads(text, object_pairs_hook=made, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} holds {kind_of(value)}; it must hold one JSON object", field=field)
    if twice:
        found, name = twice[-1]  # the outermost, which nothing has replaced
        path = shortened("".join([*_path_to(found, value), _step(name)]).removeprefix("."))
        raise InvalidRequestError(
            f"{what} gives {path} twice, and only one of them could count; leave one out", field=path
        )
    return value


def _path_to(wanted: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """The steps from the root to an object in it."""
    path: list[str] = []
    walks = [_children(root)]
    if root is wanted:
        return path
    while walks:
        child, step = next(walks[-1], (None, ""))
        if child is None:
            walks.pop()
            path = path[:-1]
        elif child is wanted:
            return [*path, step]
        else:
            walks.append(_children(child))
            path.append(step)
    return path


def _children(node: Any) -> Iterator[tuple[Any, str]]:
    """Objects and lists, and the step to each."""
    each = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in each:
        if isinstance(child, dict | list):
            yield child, _step(key) if isinstance(key, str) else f"[{key}]"


def _step(name: str) -> str:
    return f".{shortened(name)}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{shown(constant)} is no number of JSON")
