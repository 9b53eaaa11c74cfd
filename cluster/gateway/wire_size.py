"""What a message would take in memory, from its bytes alone: refused before it is decoded.

Decoded, a list of small numbers takes four to eight times its bytes, and one of empty texts more. The wire
format (https://protobuf.dev/programming-guides/encoding) tells the lengths; values are not looked at.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kernels_integration.errors import MAX_SHOWN, InvalidRequestError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_MAX_FIELDS = 2**16
"""Of a message and those inside it. A packed list, as proto3 writes numbers, is one; looking at so many takes
some hundredths of a second."""

_MAX_LOOKED_AT = 64
"""Fields among which the id of a refused request is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBounds:
    """max_values: of one packed list. max_text_bytes: of a text; None: of any length."""

    max_values: int
    max_text_bytes: int | None = None


def check_size(data: bytes, message: Descriptor, bounds: WireBounds) -> None:
    """Errors: InvalidRequestError beyond the bounds. Bytes that are no message pass: decoding tells."""
    try:
        _Scan(bounds).message(memoryview(data), message, "")
    except IndexError:  # it ends in the middle of a field
        return


def text_of(data: bytes, message: Descriptor, name: str) -> str:
    """The field `name` of a message that is not decoded; "" where it is not among the first fields, no text,
    or long.
    """
    if name not in message.fields_by_name:
        return ""
    number = message.fields_by_name[name].number
    view, position = memoryview(data), 0
    try:
        for _ in range(_MAX_LOOKED_AT):
            tag, position = _varint(view, position)
            wire = tag & 7
            length = _WIDTHS.get(wire, 0)
            if wire in (_VARINT, _BYTES):
                value, position = _varint(view, position)
                length = value if wire == _BYTES else 0
            if wire == _BYTES and tag >> 3 == number and length <= MAX_SHOWN:
                return bytes(view[position : position + length]).decode(errors="replace")
            position += length
    except IndexError:
        pass
    return ""


class _Scan:
    def __init__(self, bounds: WireBounds) -> None:
        self._bounds = bounds
        self._fields_left = _MAX_FIELDS

    def message(self, data: memoryview, kind: Descriptor, path: str) -> None:
        position = 0
        while position < len(data):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise InvalidRequestError(
                    f"{path or 'the request'} holds more than {_MAX_FIELDS} entries; send fewer, and numbers "
                    "in packed form",
                    field=path or "message",
                )
            tag, position = _varint(data, position)
            wire = tag & 7
            if wire == _VARINT:
                _, position = _varint(data, position)
            elif wire in _WIDTHS:
                position += _WIDTHS[wire]
            elif wire == _BYTES:
                length, position = _varint(data, position)
                if position + length > len(data):
                    return
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None:
                    self._bytes(data[position : position + length], field, path)
                position += length
            else:
                return

    def _bytes(self, data: memoryview, field: Any, path: str) -> None:
        path = f"{path}.{field.name}" if path else field.name
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            self.message(data, field.message_type, path)
        elif field.type == FieldDescriptor.TYPE_STRING:
            limit = self._bounds.max_text_bytes
            if limit is not None and len(data) > limit:
                raise InvalidRequestError(
                    f"{path} has {len(data)} bytes; no text of a request has more than {limit} here, which "
                    "follows from max_model_len: shorten it or raise --max-model-len",
                    field=path,
                )
        elif field.type != FieldDescriptor.TYPE_BYTES and len(data) > self._bounds.max_values:
            count = _num_varints(data, self._bounds.max_values)
            if count > self._bounds.max_values:
                raise InvalidRequestError(
                    f"{path} holds {count} numbers or more; no list of a request has more than "
                    f"{self._bounds.max_values} here, nor a prompt more than max_model_len",
                    field=path,
                )


def _num_varints(data: memoryview, limit: int) -> int:
    """As many as there are, or only that they are more than the limit."""
    at_least = len(data) // _MAX_VARINT_BYTES
    if at_least > limit:
        return at_least
    # the last byte of each lacks the high bit
    return int(np.count_nonzero(np.frombuffer(data, np.int8) >= 0))


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """The number, and where it ends. Errors: IndexError."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError
