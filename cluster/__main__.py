"""`python -m cluster`: the command `latentray` where it is not installed."""

from cluster.cli import main

main()
