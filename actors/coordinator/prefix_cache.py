"""The prefix cache: full blocks of tokens, found again by a hash of everything up to their end."""

import hashlib
from array import array
from collections.abc import Callable
from typing import Literal

import xxhash

from actors.coordinator.blocks import BlockManager
from actors.coordinator.request_state import NEVER, RequestState

HashAlgorithm = Literal["xxhash", "sha256"]


def _xxhash(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_DIGESTS: dict[HashAlgorithm, Callable[[bytes], bytes]] = {"xxhash": _xxhash, "sha256": _sha256}


class PrefixCache:
    """Finds the published beginning of a request, and publishes what its steps complete (contracts/mtp.md 6).

    A block's hash covers its tokens, all tokens before them and the request's salt, so equal hashes mean
    equal KV - of the MTP layer too, whose entry of a slot depends on tokens up to that slot alone. The salt
    separates tenants: timing tells nobody what others have asked. xxhash is fast but can be forced to
    collide by who chooses the tokens, who then reads another's KV as his own; sha256 cannot, for a
    microsecond a block.
    """

    def __init__(self, blocks: BlockManager, *, is_on: bool, algorithm: HashAlgorithm) -> None:
        self._blocks = blocks
        self._is_on = is_on
        self._digest = _DIGESTS[algorithm]

    def find(self, request: RequestState) -> list[int]:
        """The published blocks that the request's committed tokens begin with; may cover all of them.

        None for a request that asks for log probabilities of its prompt: all rows must be computed.
        """
        if not self._is_on or request.prompt_logprobs is not None:
            return []
        self._extend_hashes(request, len(request.tokens))
        return self._blocks.published_prefix(request.block_hashes)

    def admit(self, request: RequestState, num_shared: int) -> None:
        """The request's table begins with `num_shared` published blocks; the next full one is its own."""
        request.num_published_tokens = num_shared * self._blocks.tokens_per_block
        request.publish_at = self._next_end(request) if self._is_on else NEVER

    def publish(self, request: RequestState, num_tokens: int) -> None:
        """The KV of the request's first `num_tokens` tokens is complete: publish their full blocks."""
        self._extend_hashes(request, num_tokens)
        first = request.num_published_tokens // self._blocks.tokens_per_block
        end = num_tokens // self._blocks.tokens_per_block
        for index in range(first, end):
            self._blocks.publish(request.admission, index, request.block_hashes[index])
        request.num_published_tokens = end * self._blocks.tokens_per_block
        request.publish_at = self._next_end(request)

    def _next_end(self, request: RequestState) -> int:
        return request.num_published_tokens + self._blocks.tokens_per_block

    def _extend_hashes(self, request: RequestState, num_tokens: int) -> None:
        """Committed tokens never change, so neither do the hashes."""
        hashes, size = request.block_hashes, self._blocks.tokens_per_block
        if not hashes and num_tokens >= size:
            salt = request.request.cache_salt
            parent = b"" if salt is None else self._digest(salt.encode())
        elif hashes:
            parent = hashes[-1]
        for start in range(len(hashes) * size, num_tokens // size * size, size):
            tokens = array("i", request.tokens[start : start + size])
            parent = self._digest(parent + tokens.tobytes())
            hashes.append(parent)
