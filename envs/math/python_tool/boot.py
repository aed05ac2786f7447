"""Starts a module of this folder as a program, without importing the package around it.

The supervisor and the zygote must start fast, and the zygote's memory and module table, which every
session inherits, should hold nothing of trace_gym. Run as ``python -s -P boot.py MODULE
ARGUMENT...``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_PACKAGES = ("trace_gym", "trace_gym.envs", "trace_gym.envs.math", "trace_gym.envs.math.python_tool")


def main(name: str, arguments: list[str]) -> None:
    """Import a module of this folder under its usual name, hide it from others, run its main."""
    for package in _PACKAGES:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    sys.modules[_PACKAGES[-1]].__path__ = [str(Path(__file__).resolve().parent)]
    module = importlib.import_module(f"{_PACKAGES[-1]}.{name}")
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == _PACKAGES[0]]:
        del sys.modules[loaded]
    module.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
