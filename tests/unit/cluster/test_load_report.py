import io

from actors.model.load_progress import LoadState
from cluster.cli.progress_line import ProgressLine
from cluster.report.load_report import describe_load

GIB = 2**30


def state(num_bytes: int, total_bytes: int, seconds_left: float | None) -> LoadState:
    return LoadState(num_bytes=num_bytes, total_bytes=total_bytes, seconds_left=seconds_left)


def test_shards_are_added_and_the_slowest_tells_the_time() -> None:
    states = [state(GIB, 3 * GIB, 8.0), state(GIB // 2, 3 * GIB, 12.4)]
    assert describe_load(states) == "1.5 GiB of 6.0 GiB, 12 s left"


def test_what_is_not_known_is_not_told() -> None:
    assert describe_load([]) == ""
    assert describe_load([state(0, GIB, None), state(0, 0, None)]) == ""
    assert describe_load([state(GIB, 2 * GIB, 3.0), state(0, GIB, None)]) == "1.0 GiB of 3.0 GiB"


def test_a_log_is_not_filled_with_counting_bytes() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line("waiting for 2 shards to load the model (0 s)")
    line("waiting for 2 shards to load the model: 1.5 GiB of 6.0 GiB, 12 s left (1 s)")
    line("waiting for 2 shards to load the model: 2.5 GiB of 6.0 GiB, 9 s left (2 s)")
    line("serving")
    assert len(stream.getvalue().splitlines()) == 2
