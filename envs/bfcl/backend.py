"""The eight simulators of BFCL v4 multi-turn, out of the pinned wheel.

Their modules are loaded under names of our own, so that a ``bfcl_eval`` of the host, of another version or with its
defaults already poisoned by a trajectory, is neither used nor touched. They change nothing outside themselves, neither
while they load nor later (`trace_gym.envs.bfcl.stand_ins`). Upstream's executor, checker and utilities are never
imported: they evaluate text, or write folders.
"""

from __future__ import annotations

import builtins
import copy
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from trace_gym.envs.bfcl.stand_ins import stand_ins
from trace_gym.envs.pinned_wheel import PinnedWheel
from trace_gym.errors import InfrastructureError

WHEEL = PinnedWheel(
    project="bfcl-eval",
    version="2026.3.23",
    sha256="3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    variable="TRACE_GYM_BFCL_WHEEL",
    purpose="the tasks and simulators of BFCL v4 multi-turn",
)

SUBSETS = ("base", "long_context", "miss_func", "miss_param")

# Classes and the modules that define them, which are also the names of the files of their documents.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "GorillaFileSystem": "gorilla_file_system",
        "MathAPI": "math_api",
        "MessageAPI": "message_api",
        "TwitterAPI": "posting_api",
        "TicketAPI": "ticket_api",
        "TradingBot": "trading_bot",
        "TravelAPI": "travel_booking",
        "VehicleControlAPI": "vehicle_control",
    }
)
_SHARED = "long_context"  # constants that several of the modules import, by the package's name
_UPSTREAM = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_OURS = "trace_gym_bfcl_2026_3_23"
# First 16 hex digits of the sha256 of what is read: all simulator sources in the order of their names, questions,
# answers (each in the order of SUBSETS).
_SOURCES = "834513759d1f8ffe"
_QUESTIONS = ("1a21a995d06fd6f2", "78c3268c5cc8e97c", "87d28ce10e37d864", "f0c66dda3795f5f5")
_ANSWERS = ("1fee67823b317571", "e82aa0e839c39d23", "69e679b806d1c871", "59c442901779e2c3")
FINGERPRINT = hashlib.sha256(",".join((_SOURCES, *_QUESTIONS, *_ANSWERS)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Function:
    """A public method of a simulator.

    Attributes:
        name: Its name; no two simulators have one in common.
        class_name: The simulator.
        method: The plain function; takes the instance first.
        parameters: Names of the parameters, in order.
        defaults: Mutable default values as they were before the first call; each call that leaves one out gets a copy.
    """

    name: str
    class_name: str
    method: Any
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """What the wheel gives.

    Attributes:
        folder: Where the wheel is unpacked.
        fingerprint: Names the sources and data; goes into every saved state.
        classes: The simulators by name, then `File` and `Directory` of the file system.
        functions: Every function by name.
        docs: For each simulator, its functions' documents as upstream writes them, in order; not to be changed.
    """

    folder: Path
    fingerprint: str
    classes: Mapping[str, type]
    functions: Mapping[str, Function]
    docs: Mapping[str, tuple[Mapping[str, Any], ...]]


_loaded: Backend | None = None
_lock = threading.Lock()


def load_backend() -> Backend:
    """Return the simulators; fetches the wheel if it was never used before.

    Raises:
        InfrastructureError: If the wheel cannot be had or its unpacked files were changed.
        MissingExtraError: If mpmath, which one simulator calculates with, is not installed.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            _loaded = _loaded or _load()
    return _loaded


def _load() -> Backend:
    answers = stand_ins()
    folder = WHEEL.unpacked()
    _check(folder)
    modules = _import(folder, answers)
    classes = {name: getattr(modules[module], name) for name, module in MODULES.items()}
    parts = {name: getattr(modules["gorilla_file_system"], name) for name in ("File", "Directory")}
    return Backend(
        folder=folder,
        fingerprint=FINGERPRINT,
        classes=MappingProxyType(classes | parts),
        functions=MappingProxyType({f.name: f for name, class_ in classes.items() for f in _functions(name, class_)}),
        docs=MappingProxyType({name: _docs(folder, module) for name, module in MODULES.items()}),
    )


def data_file(folder: Path, subset: str, answers: bool = False) -> Path:
    """Return the file of a subset's questions, or of its answers."""
    data = folder / "bfcl_eval" / "data"
    return (data / "possible_answer" if answers else data) / f"BFCL_v4_multi_turn_{subset}.json"


def _source_folder(folder: Path) -> Path:
    return folder.joinpath(*_UPSTREAM.split("."))


def _check(folder: Path) -> None:
    """Raise unless the unpacked files are what they were in the wheel."""
    sources = sorted(_source_folder(folder).glob("*.py"))
    groups = [(_SOURCES, sources)]
    groups += [(f, [data_file(folder, s)]) for f, s in zip(_QUESTIONS, SUBSETS, strict=True)]
    groups += [(f, [data_file(folder, s, answers=True)]) for f, s in zip(_ANSWERS, SUBSETS, strict=True)]
    for expected, files in groups:
        try:
            found = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
        except OSError as error:
            found = str(error)
        if found != expected:
            raise InfrastructureError(
                "wheel_changed",
                f"Files of the unpacked wheel were changed ({files[0].name if files else 'sources'}: {found}, not "
                f"{expected}). Remove {folder}; it is then made anew.",
            )


def _import(folder: Path, answers: Mapping[str, Any]) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}

    def import_(name: str, *args: Any, **kwargs: Any) -> Any:
        """Answer an import by the package's name from our own copy, and some others with a stand-in."""
        package, _, module = name.rpartition(".")
        if package == _UPSTREAM:
            return modules[module]
        return answers[name] if name in answers else builtins.__import__(name, *args, **kwargs)

    for module in (_SHARED, *MODULES.values()):
        name = f"{_OURS}_{module}"
        loader = importlib.machinery.SourceFileLoader(name, str(_source_folder(folder) / f"{module}.py"))
        spec = importlib.util.spec_from_loader(name, loader)
        if spec is None:
            raise ImportError(f"No module can be made of {module}.")
        modules[module] = importlib.util.module_from_spec(spec)
        vars(modules[module])["__builtins__"] = {**vars(builtins), "__import__": import_}
        sys.modules[name] = modules[module]  # pickle looks classes up here
        loader.exec_module(modules[module])
    return modules


def _functions(class_name: str, simulator: type) -> list[Function]:
    found = []
    for name, method in inspect.getmembers(simulator, inspect.isfunction):
        if name.startswith("_"):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        defaults = {p.name: copy.deepcopy(p.default) for p in parameters if isinstance(p.default, (list, dict, set))}
        found.append(Function(name, class_name, method, tuple(p.name for p in parameters), defaults))
    return found


def _docs(folder: Path, module: str) -> tuple[Mapping[str, Any], ...]:
    file = folder / "bfcl_eval" / "data" / "multi_turn_func_doc" / f"{module}.json"
    return tuple(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
