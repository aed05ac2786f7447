"""Index folders: complete or absent, and each says what it was built from and with."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trace_gym.errors import BadInputError

META = "index.json"
_SECONDS_BETWEEN_REPORTS = 2.0

Progress = Callable[[int], None]  # told how many passages are done


class Reports:
    """Passes progress on, every few seconds."""

    def __init__(self, progress: Progress | None) -> None:
        """Start the clock."""
        self._progress = progress
        self._next = time.monotonic() + _SECONDS_BETWEEN_REPORTS

    def tell(self, done: int, last: bool = False) -> None:
        """Report if it is time, or for the last time."""
        if self._progress is not None and (last or time.monotonic() > self._next):
            self._next = time.monotonic() + _SECONDS_BETWEEN_REPORTS
            self._progress(done)


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Let one process at a time build a folder; the others wait (where the system can lock files)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_index(folder: Path) -> bool:
    """Return whether the folder says what it is."""
    return (folder / META).is_file()


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Say what a folder was built from and with."""
    (folder / META).write_text(json.dumps(meta, indent=1) + "\n")


def read_meta(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what an index folder says of itself.

    Raises:
        BadInputError: If it does not say anything, or something other than `wanted`.
    """
    try:
        meta = dict(json.loads((folder / META).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(f"{folder} is no index of trace_gym: {error}.") from error
    wrong = [name for name, value in wanted.items() if meta.get(name) != value]
    if wrong:
        different = "; ".join(f"{name} {meta.get(name)!r}, not {wanted[name]!r}" for name in wrong)
        raise BadInputError(
            f"The index {folder} was built with other settings: {different}. "
            "Build one that fits with: trace-gym data index CORPUS --out FOLDER --backend BACKEND"
        )
    return meta


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let a folder be written beside its place and rename it when it is complete.

    If someone else's got there first, that one stays.

    Raises:
        BadInputError: If something is at the place already.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        raise BadInputError(f"{folder} exists already; remove it or choose another folder.")
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.new-"))
    try:
        new.chmod(0o755)
        write(new)
        try:
            new.rename(folder)
        except OSError:
            if not is_index(folder):
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
