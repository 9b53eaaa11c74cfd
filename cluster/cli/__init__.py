"""The command `latentray`."""

from cluster.cli.main import main

__all__ = ["main"]
