"""Frames between the driver and the processes that run model code.

One stream socket per process. A frame is a 4-byte little-endian length and that many bytes of JSON. Descriptors ride
on a frame's first bytes. The far end is not trusted: a frame has a size cap, a reception has one deadline (so a peer
cannot buy time by dripping bytes), and the sender's pid is the kernel's word (SCM_CREDENTIALS), never the payload's.
Imports only the standard library, as the zygote loads it too.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from trace_gym.envs.math.python_tool.clock import Deadline
from trace_gym.envs.math.python_tool.clock import DeadlineError as DeadlineError

MAX_FRAME = 4 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY = socket.CMSG_SPACE(4 * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)
_CHUNK = 1 << 18
_FIRST = 1 << 11  # most frames come whole with the first call
# Every cell of a session passes here twice: what is looked up or made anew each time shows in how long one takes.
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode
_DONTWAIT, _NOSIGNAL, _CLOEXEC = (
    int(flag) for flag in (socket.MSG_DONTWAIT, socket.MSG_NOSIGNAL, socket.MSG_CMSG_CLOEXEC)
)
_PEEK = int(socket.MSG_PEEK) | _DONTWAIT
_SOCKET, _RIGHTS, _WRITER = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS), int(socket.SCM_CREDENTIALS)


class PeerGoneError(Exception):
    """The other end closed the socket or died."""


class ProtocolError(Exception):
    """The other end sent something that is not the awaited frame."""


def _wait(sock: socket.socket, event: int, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(sock, event)
    poll.poll(deadline.left() * 1000)


def send(
    sock: socket.socket,
    message: dict[str, Any],
    fds: Sequence[int] = (),
    deadline: Deadline | None = None,
) -> None:
    """Send one frame.

    Args:
        sock: A stream socket of the AF_UNIX family.
        message: What to send, as plain JSON values.
        fds: Descriptors to hand over with the frame.
        deadline: How long to wait; None waits for ever.

    Raises:
        PeerGoneError: If the other end is closed.
        DeadlineError: If the other end does not read in time.
        ProtocolError: If the message is larger than a frame may be.
    """
    body = _to_json(message).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a frame holds at most {MAX_FRAME} bytes, this one has {len(body)}")
    data = memoryview(_LENGTH.pack(len(body)) + body)
    rights = [(_SOCKET, _RIGHTS, array.array("i", fds))] if fds else []
    flags = _NOSIGNAL if deadline is None else _NOSIGNAL | _DONTWAIT
    try:
        while data:
            try:
                sent = sock.sendmsg([data], rights, flags)
            except BlockingIOError:
                _wait(sock, select.POLLOUT, deadline)
                continue
            data, rights = data[sent:], []
    except OSError as error:
        raise PeerGoneError(str(error)) from error


def receive(
    sock: socket.socket,
    deadline: Deadline | None = None,
    sender: int | None = None,
    max_bytes: int = MAX_FRAME,
    alone: bool = False,
) -> tuple[dict[str, Any], list[int], int]:
    """Receive one frame.

    Args:
        sock: A stream socket of the AF_UNIX family.
        deadline: How long to wait; None waits for ever.
        sender: The only pid whose bytes are accepted; needs SO_PASSCRED on `sock`. None accepts
            any.
        max_bytes: The longest frame that is accepted.
        alone: Whether no other frame may follow before this one is answered. Most then take one system call.

    Returns:
        The message, the descriptors that came with it (now owned by the caller) and the sender's
        pid (0 where SO_PASSCRED is off).

    Raises:
        PeerGoneError: If the other end is closed.
        DeadlineError: If no whole frame came in time.
        ProtocolError: If the frame is too large, no JSON object, not alone, or from another process.
    """
    fds: list[int] = []
    try:
        first, pid = _receive_some(sock, _FIRST if alone else _LENGTH.size, deadline, sender, fds)
        data = bytearray(first)
        while len(data) < _LENGTH.size:
            data += _receive_some(sock, _LENGTH.size - len(data), deadline, sender, fds)[0]
        (length,) = _LENGTH.unpack_from(data)
        if length > max_bytes:
            raise ProtocolError(f"a frame holds at most {max_bytes} bytes, {length} were announced")
        del data[: _LENGTH.size]
        while len(data) < length:
            data += _receive_some(sock, length - len(data), deadline, sender, fds)[0]
        if len(data) > length:
            raise ProtocolError("more came than the awaited frame")
        try:
            message = _from_json(data.decode())
        except (ValueError, RecursionError) as error:
            raise ProtocolError("the frame is not JSON") from error
        if not isinstance(message, dict):
            raise ProtocolError("the frame is not a JSON object")
    except BaseException:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
    return message, fds, pid


def _receive_some(
    sock: socket.socket, size: int, deadline: Deadline | None, sender: int | None, fds: list[int]
) -> tuple[bytes, int]:
    """Receive at least one byte and at most `size`, and who wrote them."""
    flags = _CLOEXEC if deadline is None else _CLOEXEC | _DONTWAIT
    pid = 0
    while True:
        try:
            # What is there is taken, however late: only waiting has an end.
            chunk, ancillary, _, _ = sock.recvmsg(min(size, _CHUNK), _ANCILLARY, flags)
            break
        except BlockingIOError:
            _wait(sock, select.POLLIN, deadline)
        except OSError as error:
            raise PeerGoneError(str(error)) from error
    for level, kind, payload in ancillary:
        if level == _SOCKET and kind == _RIGHTS:
            handed = array.array("i")
            handed.frombytes(payload[: len(payload) - len(payload) % handed.itemsize])
            fds.extend(handed)
        elif level == _SOCKET and kind == _WRITER:
            pid = _CREDENTIALS.unpack(payload)[0]
    if not chunk:
        raise PeerGoneError("the socket is closed")
    if sender is not None and pid != sender:
        raise ProtocolError(f"process {pid} wrote on the socket of process {sender}")
    return chunk, pid


def is_silent(sock: socket.socket) -> bool:
    """Whether nothing unsolicited waits on the socket (one request is outstanding at most)."""
    try:
        sock.recv(1, _PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
