"""One stop string, sought in text that comes in pieces."""


class StopString:
    """Reads text in pieces and looks for one string in it (Knuth, Morris and Pratt): linear in the text."""

    __slots__ = ("_borders", "_text", "num_matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = [0]
        """[i]: length of the longest proper end of text[: i + 1] that begins it; grown when needed."""
        self.num_matched = 0
        """Length of the longest end of what was read that begins the string, and is not all of it."""

    def push(self, piece: str) -> int:
        """Characters of the piece up to where the string first ends in it; 0: nowhere."""
        text, matched = self._text, self.num_matched
        if not matched and text[0] not in piece:
            return 0
        first_end = 0
        for i, char in enumerate(piece, start=1):
            while matched and char != text[matched]:
                matched = self._border(matched)
            matched += char == text[matched]
            if matched == len(text):
                first_end = first_end or i
                matched = self._border(matched)
        self.num_matched = matched
        return first_end

    def _border(self, length: int) -> int:
        """Of the first `length` characters."""
        text, borders = self._text, self._borders
        while len(borders) < length:
            border, character = borders[-1], text[len(borders)]
            while border and text[border] != character:
                border = borders[border - 1]
            borders.append(border + (text[border] == character))
        return borders[length - 1]
