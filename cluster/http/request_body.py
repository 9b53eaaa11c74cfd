"""Bodies of requests: JSON objects, within limits of size, time and of what all of them take together."""

import asyncio
from typing import Any

from aiohttp import web

from cluster.openai.strict_json import json_object
from kernels_integration.errors import InvalidRequestError, OverloadedError, shortened, shown

READ_TIMEOUT_S = 60.0
"""From the headers to the last byte."""
MAX_BODIES_AT_ONCE = 16
"""Of the largest size: what is read and not parsed yet takes so much memory, at most."""


class BodyReader:
    """Reads the bodies of one server. max_bytes: of one body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_held = MAX_BODIES_AT_ONCE * max_bytes
        self._num_held = 0
        """Bytes that are being read."""

    async def json_object(self, http: web.Request) -> dict[str, Any]:
        """The body. Errors: InvalidRequestError when it is no JSON object; OverloadedError; web's own for
        type, size and time.

        A page in a browser may send text or forms anywhere; only JSON asks the server first whether it may.
        """
        if http.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(
                reason=f"Content-Type is {shown(http.content_type)}; it must be application/json"
            )
        encoding = http.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise web.HTTPUnsupportedMediaType(
                reason=f"Content-Encoding is {shown(encoding)}; send the body as it is, without one"
            )
        if (http.content_length or 0) > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, http.content_length or 0)
        return json_object(await self._read(http), what="the body", field="body")

    async def _read(self, http: web.Request) -> bytes:
        content = bytearray()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in http.content.iter_any():
                    content += piece
                    self._num_held += len(piece)
                    if len(content) > self._max_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._max_bytes, len(content))
                    if self._num_held > self._max_held:
                        raise OverloadedError(
                            f"more than {self._max_held} bytes of requests are being read; try again later"
                        )
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                reason=f"the body has not come within {READ_TIMEOUT_S:g} seconds; send it faster"
            ) from None
        except web.RequestPayloadError as error:
            raise InvalidRequestError(
                f"the body cannot be read: {shortened(' '.join(str(error).split()))}", field="body"
            ) from error
        finally:
            self._num_held -= len(content)
        return bytes(content)
