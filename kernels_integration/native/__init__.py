"""The CPU backend in C: each operation of the torch backend as one call, compiled for its machine."""
