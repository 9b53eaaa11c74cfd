"""Python clients of the gRPC service, blocking and asyncio. They need neither torch nor Ray.

with Client("localhost:50051") as client:
    for piece in client.generate("What is the capital of France?", max_tokens=32):
        print(piece.text, end="")
"""

from actors.sampling_params import SamplingParams
from cluster.client.aio import AsyncClient
from cluster.client.credentials import Credentials
from cluster.client.results import Completion, Health, Load, ModelInfo, Piece, ServerInfo, Usage
from cluster.client.sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "Credentials",
    "Health",
    "Load",
    "ModelInfo",
    "Piece",
    "SamplingParams",
    "ServerInfo",
    "Usage",
]
