"""The command `latentray`."""

from collections.abc import Sequence

from cluster.launch.signals import exit_on_signals


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; see cluster.cli.app. Signals end it also while what it needs is imported."""
    exit_on_signals()
    from cluster.cli import app

    app.main(argv)
