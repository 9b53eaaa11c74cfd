"""The gRPC service in front of a group: `vllm.grpc.engine.VllmEngine`, health and reflection on one port."""

from cluster.gateway.server import GatewayServer

__all__ = ["GatewayServer"]
