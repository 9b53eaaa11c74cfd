"""Keys of the sockets between a group's processes: who has none can neither send, nor read, nor be a shard.

The driver draws them and hands them to its actors; they are never written to a file or a log.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any

import zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """Of a coordinator's end: its own CURVE pair, whom it lets in, and what lifelines are greeted with."""

    public: bytes
    secret: bytes = field(repr=False)
    member: bytes
    """The public key of its members."""
    lifeline: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKeys:
    """Of whoever connects there: the server's public key, and the pair that all members share."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)
    lifeline: bytes = field(repr=False)

    def lock(self, socket: "zmq.Socket[Any]") -> None:
        """Before it connects: it will talk to this server alone, encrypted."""
        socket.curve_serverkey = self.server
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelKeys:
    """Of one channel of one group. A coordinator's successor has those of the one before it."""

    server: ServerKeys
    member: MemberKeys

    @classmethod
    def draw(cls) -> "ChannelKeys":
        server_public, server_secret = zmq.curve_keypair()
        member_public, member_secret = zmq.curve_keypair()
        lifeline = secrets.token_bytes(32)
        return cls(
            server=ServerKeys(
                public=server_public, secret=server_secret, member=member_public, lifeline=lifeline
            ),
            member=MemberKeys(
                server=server_public, public=member_public, secret=member_secret, lifeline=lifeline
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKeys:
    """steps: between coordinator and shards. requests: between front ends and coordinator."""

    steps: ChannelKeys
    requests: ChannelKeys

    @classmethod
    def draw(cls) -> "GroupKeys":
        return cls(steps=ChannelKeys.draw(), requests=ChannelKeys.draw())


PROOF_BYTES = hashlib.sha256().digest_size


def proof(secret: bytes, greeting: bytes) -> bytes:
    """That a greeting comes from who has the secret."""
    return hmac.digest(secret, greeting, "sha256")


def is_proven(secret: bytes, greeting: bytes, given: bytes) -> bool:
    return hmac.compare_digest(proof(secret, greeting), given)
