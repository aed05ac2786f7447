"""Starts a module of this folder as a program, without importing the package around it.

Workers should start fast and hold nothing of trace_gym but what grades. Run as ``python -s -P boot.py MODULE
ARGUMENT...``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_OUTER = ("trace_gym", "trace_gym.envs", "trace_gym.envs.math")
_PACKAGES = ("grading", "python_tool")


def main(name: str, arguments: list[str]) -> None:
    """Import a module of this folder under its usual name and run its main."""
    folder = Path(__file__).resolve().parent
    for package in (*_OUTER, *(f"{_OUTER[-1]}.{package}" for package in _PACKAGES)):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    for package in _PACKAGES:
        sys.modules[f"{_OUTER[-1]}.{package}"].__path__ = [str(folder.with_name(package))]
    importlib.import_module(f"{_OUTER[-1]}.grading.{name}").main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
