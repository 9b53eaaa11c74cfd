"""The server's tokenizer, built from what GetTokenizer sends: text is made here, the wire holds ids."""

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2

from cluster.tokenizer import Tokenizer, load_tokenizer
from kernels_integration.errors import LatentrayError


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
        archive.extractall(folder)
        return load_tokenizer(folder)
