"""Passages on disk, memory-mapped: an index holds its texts and does not need the corpus file any more."""

from __future__ import annotations

import json
import mmap
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trace_gym.envs.search.retrieval.base import Passage


def save_array(folder: Path, name: str, values: npt.NDArray[Any]) -> None:
    """Write an array of an index."""
    np.save(folder / f"{name}.npy", values)


def create_array(folder: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Create an array of an index to be filled through its mapping."""
    if not all(shape):  # an empty file cannot be mapped
        save_array(folder, name, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)


def load_array(folder: Path, name: str, mode: Literal["r", "r+"] = "r") -> npt.NDArray[Any]:
    """Map an array of an index; as a plain ndarray, whose slices are cheap."""
    path = folder / f"{name}.npy"
    try:
        mapped: npt.NDArray[Any] = np.load(path, mmap_mode=mode).view(np.ndarray)
        return mapped
    except ValueError:  # empty
        return np.asarray(np.load(path))


class Blobs:
    """Byte strings one after the other in a file, with their bounds in another."""

    def __init__(self, folder: Path, name: str) -> None:
        """Map both files."""
        self.bounds = memoryview(load_array(folder, f"{name}.bounds"))
        with (folder / f"{name}.bin").open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.bounds[-1] else b""

    def __len__(self) -> int:
        """Return the number of strings."""
        return len(self.bounds) - 1

    def __getitem__(self, place: int) -> bytes:
        """Return a string."""
        return self._data[self.bounds[place] : self.bounds[place + 1]]


class PassageWriter:
    """Writes passages into an index folder, in order."""

    def __init__(self, folder: Path) -> None:
        """Create the file."""
        self._folder = folder
        self._file = (folder / "passages.bin").open("wb")
        self._bounds = array("q", [0])

    def add(self, passage: Passage) -> None:
        """Append a passage."""
        row = json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False, separators=(",", ":"))
        self._bounds.append(self._bounds[-1] + self._file.write(row.encode("utf-8", "surrogatepass")))

    def __enter__(self) -> PassageWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; write the bounds unless something failed."""
        self._file.close()
        if kind is None:
            save_array(self._folder, "passages.bounds", np.frombuffer(self._bounds, np.int64))


class PassageStore:
    """The passages of an index folder."""

    def __init__(self, folder: Path) -> None:
        """Map the files."""
        self._blobs = Blobs(folder, "passages")

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._blobs)

    def __getitem__(self, doc: int) -> tuple[str, str, str]:
        """Return id, title and text of a passage."""
        id, title, text = json.loads(self._blobs[doc].decode("utf-8", "surrogatepass"))
        return id, title, text
