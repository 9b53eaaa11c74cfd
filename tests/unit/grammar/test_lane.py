"""A call that takes too long is given up alone: what was given before and behind it is done."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from actors.grammar.lane import Lane

FOREVER = float("inf")


def busy(stop: threading.Event) -> None:
    """Takes CPU time until it is told to stop, as a call that cannot be interrupted."""
    while not stop.is_set():
        pass


def test_calls_run_in_their_order_and_give_what_they_came_to() -> None:
    lane, seen = Lane(), []
    futures = [lane.submit(lambda i=i: seen.append(i), cpu_s=FOREVER) for i in range(50)]
    broken = lane.submit(lambda: 1 // 0, cpu_s=FOREVER)
    assert lane.result(lane.submit(lambda: "last", cpu_s=FOREVER)) == "last"
    assert seen == list(range(50))
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        lane.result(broken)


def test_a_call_that_takes_too_long_is_given_up_and_those_behind_it_run() -> None:
    lane, stop = Lane(), threading.Event()
    before = lane.submit(lambda: 1, cpu_s=FOREVER)
    late = lane.submit(lambda: busy(stop), cpu_s=0.1)
    behind = lane.submit(lambda: 2, cpu_s=FOREVER)
    assert lane.result(behind) == 2  # whoever waits gives up what it waits behind
    assert lane.result(before) == 1
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s of CPU time"):
        lane.result(late)
    assert lane.num_given_up == 1
    stop.set()
    for _ in range(1000):
        if not lane.num_given_up:
            break
        time.sleep(0.01)
    assert lane.num_given_up == 0
    assert lane.result(lane.submit(lambda: 3, cpu_s=FOREVER)) == 3


def test_waiting_is_no_work() -> None:
    """A call whose thread gets no time, as on a busy machine, is not late."""
    lane = Lane()
    assert lane.result(lane.submit(lambda: time.sleep(0.3), cpu_s=0.1)) is None


def test_its_thread_ends_with_the_lane() -> None:
    lane = Lane()
    lane.result(lane.submit(lambda: None, cpu_s=FOREVER))
    thread, gone = lane._runners[-1].thread, weakref.ref(lane)
    del lane
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_python_may_end_while_a_call_that_was_given_up_runs() -> None:
    """Its thread must not come back into a Python that is gone: that aborts the process."""
    code = """
import itertools
import numpy as np, xgrammar
from actors.grammar.lane import Lane
tokens = [bytes(letters) for letters in itertools.product(range(97, 123), repeat=3)]
info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[0])
grammar = xgrammar.GrammarCompiler(info, enable_dynamic_compilation=True).compile_regex("(.?){20000}")
matcher, words = xgrammar.GrammarMatcher(grammar), np.zeros((1, -(-len(tokens) // 32)), np.int32)
lane = Lane()
late = lane.submit(lambda: matcher.fill_next_token_bitmask(words), cpu_s=0.0)
try:
    lane.result(late)
except TimeoutError:
    print("late", flush=True)
"""
    pytest.importorskip("xgrammar")
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.strip()) == (0, "late"), found.stderr
