"""What an operator asks of a running server: drain, undrain, restart; how it gets to who can do it."""
