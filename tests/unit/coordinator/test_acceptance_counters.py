"""Counters by draft position."""

from actors.coordinator.acceptance_counters import AcceptanceCounters


def test_counters_by_position() -> None:
    counters = AcceptanceCounters(3)
    for proposed, accepted in [(3, 2), (3, 0), (1, 1), (0, 0)]:
        counters.add(proposed, accepted)
    assert counters.num_verifies == 4
    assert counters.proposed == (3, 2, 2)
    assert counters.accepted == (2, 1, 0)
