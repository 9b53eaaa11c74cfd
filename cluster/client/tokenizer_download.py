"""The server's tokenizer, built from what GetTokenizer sends: text is made here, the wire holds ids."""

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2

from cluster.tokenizer import Tokenizer, load_tokenizer
from kernels_integration.errors import LatentrayError

_MAX_BYTES = 2**29
"""Unpacked; released ones have up to 40 MB."""


def from_chunks(chunks: Sequence[common_pb2.GetTokenizerChunk]) -> Tokenizer:
    """Errors: LatentrayError when the archive is not what its sha256 says."""
    data = b"".join(chunk.data for chunk in chunks)
    expected = chunks[-1].sha256 if chunks else ""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise LatentrayError(
            f"the server's tokenizer has sha256 {found}, announced as {expected or 'nothing'}; try again"
        )
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > _MAX_BYTES:
            raise LatentrayError(
                f"the server's tokenizer unpacks to {size} bytes; at most {_MAX_BYTES} are taken"
            )
        archive.extractall(folder)
        return load_tokenizer(folder)
