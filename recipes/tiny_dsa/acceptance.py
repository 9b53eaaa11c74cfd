"""What a speculative run reports of its accepted drafts."""

from collections.abc import Sequence


def acceptance_report(counts: Sequence[int]) -> dict[str, list[float] | float | int]:
    """`counts[a]` is the number of rounds in which the first `a` drafts held (a = 0 .. k).

    A round gives its accepted drafts and one token of the main model.
    """
    rounds = sum(counts)
    divisor = max(rounds, 1)
    tokens = sum((accepted + 1) * count for accepted, count in enumerate(counts))
    return {
        "accept_at_least": [round(sum(counts[j:]) / divisor, 4) for j in range(1, len(counts))],
        "tokens_per_step": round(tokens / divisor, 4),
        "rounds": rounds,
    }
