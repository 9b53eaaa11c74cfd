"""What stands in a row of tokens where there is no token: numbers below every id."""

MASKED = -1
"""Of a row at or beyond the request's last writable position: nobody asked for a token there."""
NO_TOKEN = -2
"""Nothing could be drawn: the row's logits, as its rules left them, hold nothing finite, or its rules failed.
If the acceptance walk reaches it, the request fails, alone."""
