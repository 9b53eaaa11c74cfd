"""LatentrayError -> gRPC status with details; nothing leaves a handler as UNKNOWN."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from cluster.errors import for_client, outcome, retry_after_s
from kernels_integration.errors import InvalidRequestError, LatentrayError

DOMAIN = "latentray"
"""ErrorInfo.domain; ErrorInfo.reason is the error's code in capitals."""
MAX_MESSAGE_BYTES = 1024
"""A status travels in HTTP/2 headers (three copies, percent-encoded or base64; peers take 8 KiB in all)."""


def to_status(error: LatentrayError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    message = _cut(str(error))
    code = grpc.StatusCode[outcome(error).grpc_status]
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=DOMAIN)
    details: list[Message] = [info]
    if isinstance(error, InvalidRequestError):
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(1000 * retry_after_s(error)))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=message, details=[_packed(d) for d in details])


@asynccontextmanager
async def errors_as_status(context: aio.ServicerContext, call: str) -> AsyncIterator[None]:
    """End the call with the status of what is raised inside; an internal fault gets an id for the log."""
    try:
        yield
    except aio.AbortError:
        raise
    except Exception as error:
        await _abort(context, for_client(error, call))


async def _abort(context: aio.ServicerContext, error: LatentrayError) -> None:
    status = to_status(error)
    await context.abort(
        grpc.StatusCode[outcome(error).grpc_status],
        status.message,
        (("grpc-status-details-bin", status.SerializeToString()),),
    )


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(message: str) -> str:
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
