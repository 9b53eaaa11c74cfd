"""A grammar that takes too long ends its own request: the masks of others are made meanwhile."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from actors.messages import SamplingSpec
from actors.shard import slot_grammars
from actors.shard.slot_grammars import SlotGrammars
from actors.structured_outputs import StructuredOutputs

VOCAB = 64


class FakeMatcher:
    """Allows the token behind the last one. `busy` ones take CPU time until they are told to stop."""

    def __init__(self, stop: threading.Event, busy_in: str) -> None:
        self._stop = stop
        self._busy_in = busy_in
        self._last = 0

    def advance(self, tokens: list[int]) -> None:
        self._work("advance")
        if tokens[0] != self._last + 1:
            raise ValueError(f"the grammar does not allow token {tokens[0]} here")
        self._last = tokens[-1]

    def legal(self, drafts: list[int]) -> np.ndarray:
        self._work("legal")
        bits = np.zeros(VOCAB, np.uint8)
        bits[self._last + 1 + len(drafts)] = 1
        return np.packbits(bits, bitorder="little")

    def _work(self, call: str) -> None:
        while call == self._busy_in and not self._stop.is_set():
            pass


class FakeCompiler:
    """The regex says in which call its matcher is busy."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def prepare(self) -> None:
        pass

    def matcher(self, constraint: StructuredOutputs, end_token_ids: tuple[int, ...]) -> FakeMatcher:
        matcher = FakeMatcher(self.stop, constraint.text)
        matcher._work("compile") if constraint.text == "compile" else None
        return matcher


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    found = FakeCompiler()
    yield found
    found.stop.set()


@pytest.fixture
def grammars(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> SlotGrammars:
    monkeypatch.setattr(slot_grammars, "MAX_CALL_S", 0.1)
    monkeypatch.setattr(slot_grammars, "MAX_COMPILE_S", 0.1)
    monkeypatch.setattr(slot_grammars, "TOKEN_S", 0.01)
    return SlotGrammars(compiler, vocab_start=0, slice_size=VOCAB)  # type: ignore[arg-type]


def spec(busy_in: str) -> SamplingSpec:
    return SamplingSpec(structured_outputs=StructuredOutputs("regex", busy_in), grammar_end_ids=(1,))


def legal(grammars: SlotGrammars, slot: int, drafts: list[int]) -> list[int]:
    [bits] = grammars.answer(grammars.ask(slot, [drafts]))
    assert bits is not None
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("busy_in", ["compile", "advance", "legal"])
def test_what_takes_too_long_ends_alone(grammars: SlotGrammars, busy_in: str) -> None:
    grammars.admit(0, spec(busy_in))
    grammars.admit(1, spec("nothing"))
    for slot in (0, 1):
        grammars.append(slot, [1, 2])
    asked = [grammars.ask(slot, [[], [9]]) for slot in (0, 1)]
    with pytest.raises(TimeoutError):
        grammars.answer(asked[0])
    assert len(grammars.answer(asked[1])) == 2
    assert legal(grammars, 1, [9]) == [4]
    # the late one is no matcher any more: two threads would use it at once
    grammars.append(0, [3])
    with pytest.raises(TimeoutError):
        grammars.answer(grammars.ask(0, [[]]))
    grammars.admit(0, spec("nothing"))
    assert legal(grammars, 0, []) == [1]


def test_a_token_that_is_not_legal_is_told_with_the_next_masks(grammars: SlotGrammars) -> None:
    grammars.admit(0, spec("nothing"))
    grammars.append(0, [5])
    with pytest.raises(ValueError, match="does not allow token 5"):
        legal(grammars, 0, [])


def test_while_too_many_late_ones_are_at_work_no_grammar_is_taken_up(
    grammars: SlotGrammars, compiler: FakeCompiler
) -> None:
    for slot in range(slot_grammars.MAX_GIVEN_UP):
        grammars.admit(slot, spec("legal"))
        with pytest.raises(TimeoutError):
            legal(grammars, slot, [])
    with pytest.raises(TimeoutError, match="still at work"):
        grammars.admit(9, spec("nothing"))
    compiler.stop.set()
    for _ in range(1000):
        if not any(lane.num_given_up for lane in grammars._lanes):
            break
        time.sleep(0.01)
    grammars.admit(9, spec("nothing"))
    assert legal(grammars, 9, []) == [1]


def test_a_request_has_so_much_time_a_token(grammars: SlotGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each of its calls is late, but all of them together."""
    monkeypatch.setattr(slot_grammars, "GRANT_S", 0.05)
    monkeypatch.setattr(FakeMatcher, "_work", lambda self, call: _spend(0.02))
    grammars.admit(0, spec("nothing"))

    def go_on() -> None:
        for token in range(1, 30):
            legal(grammars, 0, [])
            grammars.append(0, [token])

    with pytest.raises(TimeoutError, match=r"it took .* s of CPU time for \d+ tokens"):
        go_on()


def _spend(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
