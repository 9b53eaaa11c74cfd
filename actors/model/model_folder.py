"""The files of a checkpoint directory, read as what they are: data from a stranger.

Every reader of text and JSON goes through `ModelFolder`: regular files, inside the directory or the release
that it links to, of bounded size and depth. Weights alone have a reader of their own (safetensors_file).
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from kernels_integration.errors import CheckpointError, kind_of, shown

MAX_FILE_BYTES = 2**24
"""Of a file without a limit of its own: configs, templates. Releases have a few KiB."""
MAX_INDEX_BYTES = 2**28
MAX_DEPTH = 64
"""Of nested JSON; releases have less than ten."""
_MAX_LINKS = 16
_MAX_DIGITS = 40
"""Of an integer; 2**64 has twenty."""


class ModelFolder:
    """One checkpoint directory. It need not exist: then it holds no files.

    A link may lead to another place inside the directory, to a file of the same name elsewhere (a folder
    that links the files of a release), or from a Hugging Face cache's snapshot to its blobs. Nothing else: a
    file that is handed to clients must not be one that only this machine's user may read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a file, or a link of that name."""
        return os.path.lexists(self.path / name)

    def names(self, under: str = "", *, suffix: str = "") -> list[str]:
        """Names, relative to the directory and sorted, of what it holds in a subfolder. Hidden files, such
        as the ._NAME that macOS leaves beside NAME, are left out."""
        try:
            found = os.listdir(self.path / under)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path / under} cannot be listed: {error.strerror}") from None
        visible = sorted(name for name in found if name.endswith(suffix) and not name.startswith("."))
        return [os.path.join(under, name) for name in visible]

    def read_bytes(self, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
        """The file's content; None where there is no such file.

        Errors: CheckpointError: it leads out of the directory, is no regular file, is too long, or cannot
        be read.
        """
        if name not in self:
            return None
        file = self.path / name
        try:
            content = self._read(name, max_bytes)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:  # a NUL in a path
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        if len(content) > max_bytes:
            raise CheckpointError(f"{file} is longer than {max_bytes} bytes, which no release is")
        return content

    def read_text(self, name: str) -> str | None:
        """The same as text, without the mark (BOM) that some editors put before it."""
        content = self.read_bytes(name)
        if content is None:
            return None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name} cannot be read as UTF-8 text: {error}") from None

    def read_object(self, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any] | None:
        """The file's JSON object; None where there is no such file.

        UTF-8, UTF-16 and UTF-32 are read, with and without a BOM.
        Errors: CheckpointError, also for text that UTF-8 cannot carry, deep nesting and endless numbers.
        """
        content = self.read_bytes(name, max_bytes=max_bytes)
        if content is None:
            return None
        file = self.path / name
        try:
            value = json.loads(content, parse_int=_integer)
        except RecursionError:
            raise CheckpointError(f"{file} cannot be read as JSON: {_TOO_DEEP}") from None
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(value, dict):
            raise CheckpointError(f"{file} holds {kind_of(value)}; it must hold one JSON object")
        fault = _fault(value)
        if fault is not None:
            raise CheckpointError(f"{file} cannot be read as JSON: {fault}")
        return value

    def _read(self, name: str, max_bytes: int) -> bytes:
        # O_NONBLOCK: opening a pipe would wait for a writer. O_NOFOLLOW: the links were followed here.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(self._followed(name), flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.path / name} cannot be read: it is no regular file")
        with open(descriptor, "rb") as stream:
            return stream.read(max_bytes + 1)

    def _followed(self, name: str) -> str:
        """The path of the file behind the links."""
        root = os.path.realpath(self.path)
        at = os.path.join(os.path.realpath(os.path.join(root, os.path.dirname(name))), os.path.basename(name))
        if not _is_inside(at, root):
            self._refuse(name, at)
        for _ in range(_MAX_LINKS):
            if not os.path.islink(at):
                return at
            target = os.path.join(os.path.dirname(at), os.readlink(at))
            target = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))
            same_name = os.path.basename(target) == os.path.basename(at)
            if not (same_name or _is_inside(target, root) or _is_blob_of(target, at)):
                self._refuse(name, target)
            at = target
        raise CheckpointError(f"{self.path / name} cannot be read: its links have no end")

    def _refuse(self, name: str, target: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path / name} leads to {target}, which is not a file of this checkpoint; "
            "put a copy of the file in its place"
        )


def _is_inside(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def _is_blob_of(target: str, link: str) -> bool:
    """Whether the link is of a snapshot in a Hugging Face cache, and the target one of its blobs:

    models--ORG--NAME/snapshots/REVISION/FILE -> models--ORG--NAME/blobs/HASH
    """
    parts = Path(link).parts
    if "snapshots" not in parts:
        return False
    repository = Path(*parts[: len(parts) - 1 - parts[::-1].index("snapshots")])
    return Path(target).parent == repository / "blobs"


_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH}"


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {digits[:10]}... has {len(digits)} digits")
    return int(digits)


def _fault(value: object) -> str | None:
    """What keeps a parsed value from being used: depth, or a text with half of a surrogate pair."""
    pending = [(value, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        if isinstance(node, dict):
            pending += ((key, depth) for key in node)
            pending += ((child, depth + 1) for child in node.values())
        elif isinstance(node, list):
            pending += ((child, depth + 1) for child in node)
        elif isinstance(node, str) and not node.isascii():
            try:
                node.encode()
            except UnicodeEncodeError:
                return f"{shown(node)} holds half of a surrogate pair"
    return None
