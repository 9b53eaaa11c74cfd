"""The lines that the processes of a run add to their log files, for who looks at one terminal."""

import os
from pathlib import Path
from typing import TextIO


class LogFollower:
    """Of the files that end in .log in one folder; also of files that appear later or start anew."""

    def __init__(self, folder: Path | None, stream: TextIO) -> None:
        self._folder = folder
        self._stream = stream
        self._seen: dict[Path, tuple[int, int]] = {}
        """The file's number and how many of its bytes were shown."""

    def poll(self) -> None:
        """Show what is new, whole lines alone. A file that cannot be read is left out."""
        if self._folder is None:
            return
        try:
            for path in sorted(self._folder.glob("*.log")):
                self._show_new(path)
        except OSError:
            return
        self._stream.flush()

    def _show_new(self, path: Path) -> None:
        with path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            seen_number, num_shown = self._seen.get(path, (number, 0))
            if seen_number != number:  # the log was rotated
                num_shown = 0
            file.seek(num_shown)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
        self._stream.write(data.decode(errors="replace"))
        self._seen[path] = (number, num_shown + len(data))
