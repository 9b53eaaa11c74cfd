"""The OpenAI-compatible door: the same answering as gRPC's, over HTTP."""
