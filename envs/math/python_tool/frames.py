"""Frames over a pipe, for processes on any system: a 4-byte little-endian length and that many bytes of JSON.

Reading blocks; whoever must not wait for ever ends the process at the other end, which ends the reading. Imports only
the standard library, as the sessions load it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_FRAME = 4 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class GarbageError(Exception):
    """The other end sent something that is no frame."""


def write(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one frame to an unbuffered stream.

    Raises:
        OSError: If the other end is closed.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[stream.write(data) :]


def read(stream: BinaryIO, max_bytes: int = MAX_FRAME) -> dict[str, Any]:
    """Read one frame from an unbuffered stream.

    Raises:
        EOFError: If the other end is closed.
        GarbageError: If it is no JSON object, or longer than `max_bytes`.
    """
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    if length > max_bytes:
        raise GarbageError(f"a frame holds at most {max_bytes} bytes, {length} were announced")
    try:
        message = json.loads(_read_exactly(stream, length))
    except (ValueError, RecursionError) as error:
        raise GarbageError("the frame is not JSON") from error
    if not isinstance(message, dict):
        raise GarbageError("the frame is not a JSON object")
    return message


def read_all(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the frames until the other end is closed or sends something else."""
    while True:
        try:
            yield read(stream)
        except (EOFError, GarbageError):
            return


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = stream.read(size - len(data))
        if not chunk:
            raise EOFError("the pipe is closed")
        data += chunk
    return bytes(data)
