"""Server reflection in both versions: clients ask for v1 first, older ones know v1alpha alone.

grpcio-reflection has v1alpha only. The two differ in nothing but the name of the package, so v1 is served by
the same servicer, and its descriptor is v1alpha's under that name.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

_OLD_PACKAGE = "grpc.reflection.v1alpha"
_PACKAGE = "grpc.reflection.v1"
SERVICE_NAME = f"{_PACKAGE}.ServerReflection"
SERVICE_NAMES = (SERVICE_NAME, str(reflection.SERVICE_NAME))


def add_reflection(services: Iterable[str], server: aio.Server) -> None:
    """Let clients ask `server` for these services, and for reflection itself."""
    _describe_v1(descriptor_pool.Default())
    names = (*services, *SERVICE_NAMES)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection_aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE_NAME, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    try:
        pool.FindFileContainingSymbol(SERVICE_NAME)
        return
    except KeyError:
        pass
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = _PACKAGE
    methods = [method for service in file.service for method in service.method]
    fields = [field for message in file.message_type for field in message.field if field.type_name]
    for method in methods:
        method.input_type = method.input_type.replace(_OLD_PACKAGE, _PACKAGE)
        method.output_type = method.output_type.replace(_OLD_PACKAGE, _PACKAGE)
    for field in fields:
        field.type_name = field.type_name.replace(_OLD_PACKAGE, _PACKAGE)
    pool.Add(file)
