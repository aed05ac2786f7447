"""What a cell prints: the first and the last bytes, kept outside of the process that prints them.

Layout of the memory: HEADER, then `half` bytes of head, then a ring of `half` bytes with the latest
of the rest. So a flood costs nothing, the result printed last survives the cut, and what a cell had
printed is there when its process is killed. Runs on every system: the memory is anything writable
that both sides see, or the process' own.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import struct
from typing import Any

HEADER = struct.Struct("<Q")  # how many bytes were printed
_NEWLINE = 10
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

Memory = int | bytearray | mmap.mmap  # a descriptor of a file or of shared memory, or the bytes themselves


def memory_size(half: int) -> int:
    """Return how many bytes a screen needs that keeps `half` bytes at each end."""
    return HEADER.size + 2 * half


class Screen(io.RawIOBase):
    """The writing side: a raw stream that never fails, never blocks and never grows."""

    def __init__(self, half: int) -> None:
        """Make a screen that keeps `half` bytes at each end."""
        self._half = half
        self._memory: mmap.mmap | bytearray | None = None
        self._total = 0

    def open(self, memory: Memory) -> None:
        """Show a new cell on `memory`, which has `memory_size` zero bytes; a descriptor is closed here."""
        if isinstance(memory, int):
            fd, memory = memory, mmap.mmap(memory, memory_size(self._half))
            os.close(fd)
        self._memory = memory
        self._total = 0

    @property
    def is_at_line_start(self) -> bool:
        """Whether what comes next stands at the start of a line."""
        if self._memory is None or not self._total:
            return True
        return self._memory[self._place(self._total - 1)] == _NEWLINE

    def shut(self) -> None:
        """Let go of the memory; what is printed now is lost."""
        memory, self._memory = self._memory, None
        if isinstance(memory, mmap.mmap):
            memory.close()

    def close(self) -> None:
        """Do nothing: `sys.stdout.close()` in a cell must not silence the later ones."""

    def writable(self) -> bool:
        """Say that this stream takes output."""
        return True

    def write(self, data: Any) -> int:
        """Take bytes. Two calls for every line that a cell prints, so the usual case comes first."""
        size, memory, total = len(data), self._memory, self._total
        if memory is None:
            return size
        end = total + size
        place = self._place(total)
        if type(data) is bytes and place + size <= len(memory) and (end <= self._half or total >= self._half):
            memory[place : place + size] = data
        else:
            size = self._write_parts(memoryview(data).cast("B"), memory)
            end = total + size
        self._total = end
        HEADER.pack_into(memory, 0, end)
        return size

    def _place(self, position: int) -> int:
        """Return where in the memory a byte of the output lies."""
        half = self._half
        return HEADER.size + (position if position < half else half + (position - half) % half)

    def _write_parts(self, view: memoryview, memory: mmap.mmap | bytearray) -> int:
        """Write what does not fit in one piece; of a huge write only the ends can stay."""
        size, half, total = len(view), self._half, self._total
        done = max(0, min(size, half - total))
        memory[HEADER.size + total : HEADER.size + total + done] = view[:done].tobytes()
        done = max(done, size - half)
        while done < size:
            place = self._place(total + done)
            part = min(size - done, len(memory) - place)
            memory[place : place + part] = view[done : done + part].tobytes()
            done += part
        return size


def read_screen(data: bytes, half: int, limit: int) -> tuple[str, bool]:
    """Return what a screen shows, cut in the middle to `limit` characters, and whether it was cut.

    Memory addresses are blanked, as they differ from run to run. The writer is not trusted: any bytes are fine.

    Args:
        data: The memory, `memory_size` bytes.
        half: As for `Screen`.
        limit: The longest text, without the mark of the cut.
    """
    (total,) = HEADER.unpack_from(data)
    head = data[HEADER.size : HEADER.size + min(total, half)]
    tail = data[HEADER.size + half :]
    if total <= 2 * half:
        text = _as_shown(head + tail[: max(0, total - half)])
        if len(text) <= limit:
            return text, False
        start, end = text, text
    else:
        at = (total - half) % half
        start, end = _as_shown(head), _as_shown(tail[at:] + tail[:at])
    keep = limit // 2
    start, end = start[:keep], end[len(end) - keep :]
    omitted = total - len(start.encode()) - len(end.encode())
    mark = f"\n[... output cut here: about {max(1, omitted)} bytes omitted ...]\n"
    return start + mark + end, True


def _as_shown(data: bytes) -> str:
    """Decode as a notebook shows it: no colours, and of a line that was overwritten its last form."""
    text = _ADDRESS.sub("at 0x…", data.decode(errors="replace"))
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return text
