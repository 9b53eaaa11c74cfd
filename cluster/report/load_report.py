"""Loading told to people: what the shards have read, and how long it will take."""

from collections.abc import Sequence

from actors.model.load_progress import LoadState
from cluster.config.sizes import format_size


def describe_load(states: Sequence[LoadState]) -> str:
    """ "1.2 GiB of 3.4 GiB, 12 s left" of all shards together; "" before any knows what it will read."""
    if not all(state.total_bytes for state in states) or not states:
        return ""
    done, total = sum(state.num_bytes for state in states), sum(state.total_bytes for state in states)
    told = f"{format_size(done)} of {format_size(total)}"
    left = [state.seconds_left for state in states if state.seconds_left is not None]
    # All are waited for, so the slowest one counts.
    return f"{told}, {max(left):.0f} s left" if len(left) == len(states) else told
