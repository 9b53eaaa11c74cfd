"""What GetTokenizer streams: the checkpoint's tokenizer as a zip, cut into chunks."""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping

from smg_grpc_proto.generated import common_pb2

from cluster.tokenizer.files import TokenizerFiles

CHUNK_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip can hold: equal files give an equal archive, whatever node made it."""


class TokenizerBundle:
    """A deterministic zip of the tokenizer's files, and its sha256."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.data = _zipped(files.members())
        self.sha256 = hashlib.sha256(self.data).hexdigest()

    def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """The archive in order; the last chunk carries the sha256 of the whole."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            data = self.data[start : start + CHUNK_BYTES]
            last = start + CHUNK_BYTES >= len(self.data)
            yield common_pb2.GetTokenizerChunk(data=data, sha256=self.sha256 if last else "")


def _zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
