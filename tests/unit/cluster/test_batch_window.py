"""The order in which rows are asked for: one beginning together, long ones first, in a bounded window."""

from dataclasses import dataclass

import pytest

from actors.requests import Request
from actors.sampling_params import SamplingParams
from cluster.batch import window
from cluster.batch.window import arranged, in_windows


@dataclass
class Row:
    request: Request
    num_bytes: int = 100

    @property
    def name(self) -> str:
        return self.request.request_id


def row(name: str, prompt: tuple[int, ...], *, max_tokens: int = 1, salt: str | None = None) -> Row:
    return Row(
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            eos_token_ids=(),
            cache_salt=salt,
        )
    )


COMMON, OTHER = tuple(range(10, 42)), tuple(range(100, 132))


def test_common_beginnings_stand_together_and_long_groups_first() -> None:
    rows = [
        row("a1", (*COMMON, 5)),
        row("b1", (*OTHER, 5)),
        row("a2", (*COMMON, 6, 7)),
        row("b2", (*OTHER, 6), max_tokens=100),
        row("a3", (*COMMON, 5, 1)),
        row("salted", (*COMMON, 5), salt="tenant"),
        row("short", (3,)),
    ]
    assert [r.name for r in arranged(rows)] == ["b1", "b2", "a1", "a3", "a2", "salted", "short"]


def test_a_window_is_bounded_by_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MAX_ROWS", 10)
    read: list[int] = []
    ahead: list[int] = []

    def rows(num_bytes: int) -> list[str]:
        def source():  # type: ignore[no-untyped-def]
            for i in range(200):
                read.append(i)
                yield Row(row(str(i), (3, i % 7)).request, num_bytes)

        read.clear()
        ahead.clear()
        names = []
        for found in in_windows(source(), num_first=3):
            ahead.append(len(read) - len(names))
            names.append(found.name)
        assert sorted(map(int, names)) == list(range(200)), "each row once"
        return names

    names = rows(num_bytes=1)
    assert max(ahead) <= 20, "two windows"
    assert names != [str(i) for i in range(200)]
    assert max(abs(position - int(name)) for position, name in enumerate(names)) < 20, "none waits for long"
    rows(num_bytes=window.MAX_BYTES)
    assert max(ahead) <= 4, "what is too long is read one by one"


def test_the_first_rows_wait_for_few_others() -> None:
    read: list[int] = []
    source = (read.append(i) or row(str(i), (3, i)) for i in range(10_000))  # type: ignore[func-returns-value]
    rows = in_windows(source, num_first=4)
    next(rows)
    assert len(read) <= 4 + window.READ_PER_ROW
