"""The torch backend: every operation in plain torch, on any device; the oracle of all others."""
