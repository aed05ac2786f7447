"""Calls of the simulators: by name, with data, never by evaluating anything.

A name resolves only in the table of the involved classes' public functions; arguments are JSON values, copied before
the simulator sees them. What comes back is the text that upstream's executor gives, byte for byte, and nothing is kept
of the object behind it. Calls that would run or grow without bound are answered with an error instead
(`trace_gym.envs.bfcl.guards`).

Two texts of upstream list a set, in an order that changes with every process; here they list it in alphabetical order.
"""

from __future__ import annotations

import copy
import decimal
import io
import json
import pickle
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from trace_gym.envs.bfcl.backend import Backend, load_backend
from trace_gym.envs.bfcl.codec import digest, from_graph, to_graph
from trace_gym.envs.bfcl.guards import MAX_CHARS, check_call, own_value
from trace_gym.envs.bfcl.stand_ins import Dice
from trace_gym.envs.bfcl.tasks import BFCLTask
from trace_gym.errors import StateError
from trace_gym.tool_pythonic import parse_pythonic

_STATELESS = "MathAPI"
# These simulators change something that all of their kind share (the precision of numbers, a table of the weather):
# one call at a time, and its text is made before the next.
_SERIAL = frozenset({"MathAPI", "VehicleControlAPI"})
_serial_lock = threading.Lock()
_TOGETHER = nullcontext()
_CLASS_SET = re.compile(r"\{('\w+'(?:, '\w+')*)\}$")

_initial: WeakKeyDictionary[BFCLTask, bytes] = WeakKeyDictionary()
_initial_lock = threading.Lock()


class Instances:
    """The simulators of one episode: everything in it that a call can change.

    Args:
        by_class: The simulators by the names of their classes.
    """

    __slots__ = ("_backend", "by_class")

    def __init__(self, by_class: dict[str, Any]) -> None:
        """Keep the simulators."""
        self._backend = load_backend()
        self.by_class = by_class

    @classmethod
    def fresh(cls, task: BFCLTask) -> Instances:
        """Return the simulators as a task begins; they share nothing with any others, upstream's constants included."""
        return cls.loads(cls.initial(task))

    @classmethod
    def initial(cls, task: BFCLTask) -> bytes:
        """Return what `dumps` writes of the simulators as a task begins."""
        with _initial_lock:
            blob = _initial.get(task)
        if blob is None:
            blob = cls(_begin(task, load_backend())).dumps()
            with _initial_lock:
                _initial[task] = blob
        return blob

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Make one call and return what the agent is told; whatever an agent wrote, nothing is raised."""
        function = self._backend.functions.get(name)
        if function is None or function.class_name not in self.by_class:
            return _error(f"name '{name[:64]}' is not defined")
        simulator = self.by_class[function.class_name]
        try:
            values = own_value(arguments)
            check_call(simulator, name, values)
            for parameter, default in function.defaults.items():
                if parameter not in values:
                    values[parameter] = copy.deepcopy(default)
            with _alone() if function.class_name in _SERIAL else _TOGETHER:
                return render(_settled(name, values, function.method(simulator, **values)))
        except Exception as error:  # what a simulator raises is what the agent is told
            return _error(str(error))

    def call_text(self, text: str) -> str:
        """Make the call that a text writes as in Python, such as ``"ls(a=True)"``; its arguments are literals."""
        if len(text) > MAX_CHARS:
            return _error(f"a call has at most {MAX_CHARS} characters")
        parsed = parse_pythonic(text, _signatures())
        if len(parsed.calls) != 1 or parsed.errors:
            detail = parsed.errors[0].detail if parsed.errors else "expected one call, such as ls(a=True)"
            return _error(detail)
        return self.call(parsed.calls[0].name, parsed.calls[0].arguments)

    def dumps(self) -> bytes:
        """Return the state as bytes for this process: the cheapest way to keep it.

        Raises:
            StateError: If it holds what is not data.
        """
        try:
            return pickle.dumps(self.by_class, protocol=5)
        except RecursionError:  # deep directories; the graph has no such bound
            return json.dumps(self.to_graph(), separators=(",", ":")).encode()

    @classmethod
    def loads(cls, blob: bytes) -> Instances:
        """Return simulators in the state that `dumps` wrote; every call gives others.

        Raises:
            StateError: If these are not such bytes. Nothing but the simulators' classes is ever looked up.
        """
        try:
            if blob[:1] == b"{":
                return cls.from_graph(json.loads(blob))
            return cls(_Unpickler(io.BytesIO(blob)).load())
        except (pickle.UnpicklingError, ValueError, EOFError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise StateError(f"These {len(blob)} bytes are no state of simulators: {error!r}.") from error

    def to_graph(self) -> dict[str, Any]:
        """Return the state as JSON-like data, for files and other processes.

        Raises:
            StateError: If it holds what is not data.
        """
        return to_graph(self.by_class, self._backend.classes)

    @classmethod
    def from_graph(cls, graph: Any) -> Instances:
        """Return simulators in a state of any origin.

        Raises:
            StateError: If the data is no state of simulators.
        """
        classes = load_backend().classes
        by_class = from_graph(graph, classes)
        if type(by_class) is not dict or any(type(s) is not classes.get(name) for name, s in by_class.items()):
            raise StateError("The data is no state of simulators: expected one instance for each class.")
        return cls(by_class)

    def digest(self) -> str:
        """Return a hash of the state: 32 hex digits, the same in every process."""
        return digest(self.to_graph())


def render(result: Any) -> str:
    """Return a result as the text that upstream makes of it."""
    if type(result) is str:
        return result
    if type(result) is dict:
        try:
            return json.dumps(result)
        except Exception:  # as upstream: whatever JSON cannot hold
            return str(result)
    return str(result)


@contextmanager
def _alone() -> Iterator[None]:
    """Keep the other threads' calls waiting, and the host's decimals as they are."""
    with _serial_lock, decimal.localcontext(decimal.Context()):
        yield


def _begin(task: BFCLTask, backend: Backend) -> dict[str, Any]:
    by_class = {}
    for name in task.involved_classes:
        by_class[name] = backend.classes[name]()
        if name != _STATELESS:
            scenario = copy.deepcopy(task.initial_config.get(name, {}))
            by_class[name]._load_scenario(scenario, long_context=task.is_long_context)
    return by_class


def _error(reason: str) -> str:
    return f"Error during execution: {reason}"


def _settled(name: str, values: Mapping[str, Any], result: Any) -> Any:
    """Return a result with the sets in its text in alphabetical order."""
    if name == "book_flight" and isinstance(result, dict) and isinstance(result.get("error"), str):
        in_order = _CLASS_SET.sub(lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", result["error"])
        return {**result, "error": in_order}
    if name == "edit_ticket" and str(result.get("error", "")).startswith("Invalid fields for update: "):
        fields = set(values["updates"]) - {"title", "description", "status", "priority"}
        return {"error": f"Invalid fields for update: {', '.join(sorted(fields))}"}
    return result


@cache
def _signatures() -> dict[str, tuple[str, ...]]:
    return {function.name: function.parameters for function in load_backend().functions.values()}


@cache
def _pickled() -> dict[tuple[str, str], type]:
    """Return the classes that a pickled state may name."""
    classes = (*load_backend().classes.values(), Dice)
    return {(class_.__module__, class_.__qualname__): class_ for class_ in classes}


class _Unpickler(pickle.Unpickler):
    """Looks up the simulators' classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _pickled()[module, name]
        except KeyError:
            raise StateError(f"A state of simulators does not hold a {module}.{name}.") from None
