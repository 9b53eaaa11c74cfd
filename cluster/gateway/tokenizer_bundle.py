"""What GetTokenizer streams: the checkpoint's tokenizer as a zip, cut into chunks."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from kernels_integration.errors import CheckpointError

REQUIRED_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
OPTIONAL_FILES = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json")
"""Some checkpoints keep the chat template beside tokenizer_config.json."""
CHUNK_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip can hold: equal files give an equal archive, whatever node made it."""


class TokenizerBundle:
    """A deterministic zip of the tokenizer's files, and its sha256.

    chat_template: the file of --chat-template, which clients then find as chat_template.jinja.
    """

    def __init__(self, model_path: str | Path, chat_template: str | Path | None = None) -> None:
        self.data = _zipped(Path(model_path), None if chat_template is None else Path(chat_template))
        self.sha256 = hashlib.sha256(self.data).hexdigest()

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """The archive in order; the last chunk carries the sha256 of the whole."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            data = self.data[start : start + CHUNK_BYTES]
            last = start + CHUNK_BYTES >= len(self.data)
            yield common_pb2.GetTokenizerChunk(data=data, sha256=self.sha256 if last else "")


def _zipped(folder: Path, chat_template: Path | None) -> bytes:
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}; clients need {', '.join(REQUIRED_FILES)}"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*REQUIRED_FILES, *OPTIONAL_FILES):
            file = folder / name
            if name == "chat_template.jinja" and chat_template is not None:
                file = chat_template
            if file.is_file():
                entry = zipfile.ZipInfo(name, _EPOCH)
                archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
