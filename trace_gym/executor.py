"""Where environments live: in this process, in worker processes, or in Ray actors on other machines.

A `RemoteEnv` stands for an environment elsewhere. What is done with it is a function of the environment, named by its
module, with plain arguments: it runs where the environment lives, and its result comes back. States travel as bytes
(`trace_gym.snapshot.EnvState.to_bytes`); a worker that still has the live state of these bytes goes on from that, any
other restores them.

A worker that died is an `InfrastructureError`; another takes its place when the next environment is made. An exception
of the environment is raised here as it was there if it is one of ours, else as a `TraceGymError` with its traceback.

Both ends trust each other: calls are pickled. Worker processes need Unix sockets.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

import gymnasium

from trace_gym.errors import (
    BadInputError,
    InfrastructureError,
    ReplayDivergenceError,
    TraceGymError,
    require,
    unknown_name,
)
from trace_gym.snapshot import EnvState

AnyEnv = gymnasium.Env[Any, Any]
MakeEnv = Callable[[], AnyEnv]

KEPT_STATES = 256  # live states that a worker keeps of those it has sent
_END_S = 5.0  # how long a worker may take to close its environments
_CALLS = 256  # calls that a Ray actor runs at the same time


class Link(Protocol):
    """A way to a `Worker`.

    Attributes:
        is_alive: Whether the worker was there when it was last asked.
    """

    is_alive: bool

    def request(self, call: bytes) -> bytes:
        """Return what `Worker.answer` does; several threads may ask at once.

        Raises:
            InfrastructureError: Kind ``worker_died``.
        """
        ...

    def close(self) -> None:
        """End the worker."""
        ...


class RemoteEnv:
    """An environment that lives elsewhere.

    Attributes:
        spec: Its specification.
        timings: Seconds that it took for what it times itself, since they were last taken out.
    """

    def __init__(self, link: Link, make_env: MakeEnv) -> None:
        """Make it there."""
        self.timings: dict[str, float] = {}
        self._link = link
        self._number, self.spec = self._ask("make", make_env)

    @property
    def unwrapped(self) -> RemoteEnv:
        """Return itself, which has what is read of an environment here."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its worker was there when it was last asked."""
        return self._link.is_alive

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(env, *args)``, called where the environment lives."""
        found, timings = self._ask("run", self._number, function, args)
        for name, seconds in timings.items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds
        return found

    def close(self) -> None:
        """Close it, also while a call runs; a worker that died has closed it."""
        if self.is_alive:
            try:
                self._ask("close", self._number)
            except InfrastructureError:
                pass

    def _ask(self, method: str, *args: Any) -> Any:
        kind, found = _load(self._link.request(_dump((method, args))))
        if kind == "failed":
            raise InfrastructureError(*found)
        if kind == "diverged":
            raise ReplayDivergenceError(found)
        if kind == "raised":
            raise TraceGymError(f"An environment raised an exception in its worker:\n{found}")
        return found


def run_in(env: AnyEnv | RemoteEnv, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(env, *args)``, called where the environment lives."""
    return env.run(function, *args) if isinstance(env, RemoteEnv) else function(env, *args)


class Worker:
    """The other end: environments that live here and are called from another process."""

    def __init__(self) -> None:
        """Start with none."""
        self._envs: dict[int, AnyEnv] = {}
        self._numbers = itertools.count()
        self._states = _States()

    def answer(self, call: bytes) -> bytes:
        """Call a method; return what came of it, whatever that is."""
        try:
            method, args = _load(call, self._states)
            return _dump(("returned", getattr(self, method)(*args)), self._states)
        except InfrastructureError as error:
            reply: tuple[str, Any] = "failed", (error.kind, error.reason)
        except ReplayDivergenceError as error:
            reply = "diverged", str(error)
        except Exception:
            reply = "raised", traceback.format_exc()
        return _dump(reply)

    def make(self, make_env: MakeEnv) -> tuple[int, Any]:
        """Make an environment; return its number and specification."""
        env = make_env()
        number = next(self._numbers)
        self._envs[number] = env
        return number, env.spec

    def run(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
        """Return what a function says of an environment, and the seconds that it timed."""
        env = self._envs[number]
        found = function(env, *args)
        timings = getattr(env.unwrapped, "timings", {})
        return found, {name: timings.pop(name) for name in list(timings)}

    def close(self, number: int) -> None:
        """Close an environment; once is enough."""
        env = self._envs.pop(number, None)
        if env is not None:
            env.close()

    def end(self) -> None:
        """Close all of them."""
        for number in list(self._envs):
            self.close(number)


class LocalEnvs:
    """Environments of this process."""

    def __init__(self, make_env: MakeEnv) -> None:
        """Store the maker."""
        self.make: Callable[[], AnyEnv | RemoteEnv] = make_env

    def close(self) -> None:
        """Nothing was started."""


class RemoteEnvs:
    """Environments in workers, dealt to them in turn; a worker that died is replaced.

    Args:
        make_env: Makes one environment.
        start: Starts a worker.
        workers: How many to start.

    Raises:
        BadInputError: If the maker cannot be pickled, or there is no worker.
    """

    def __init__(self, make_env: MakeEnv, start: Callable[[], Link], workers: int) -> None:
        """Start nothing yet."""
        if workers < 1:
            raise BadInputError(f"Environments need at least 1 worker; got {workers}.")
        try:
            pickle.dumps(make_env)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise BadInputError(
                f"What makes the environments must reach other processes, but cannot be pickled: {error}. Give a "
                "function of a module, or functools.partial of one."
            ) from error
        self._make_env = make_env
        self._start = start
        self._links: list[Link | None] = [None] * workers
        self._turns = itertools.cycle(range(workers))
        self._lock = threading.Lock()

    def make(self) -> AnyEnv | RemoteEnv:
        """Make an environment in the next worker."""
        with self._lock:
            turn = next(self._turns)
            link = self._links[turn]
            if link is not None and not link.is_alive:
                link.close()
                link = None
            link = self._links[turn] = link or self._start()
        return RemoteEnv(link, self._make_env)

    def close(self) -> None:
        """End the workers."""
        for link in filter(None, self._links):
            link.close()
        self._links = [None] * len(self._links)


Envs = LocalEnvs | RemoteEnvs
EXECUTORS = ("threads", "processes", "ray")


def get_executor(name: str, workers: int = 4) -> Callable[[MakeEnv], Envs]:
    """Return what makes environments by the name of where they live.

    Args:
        name: ``"threads"`` of this process, ``"processes"`` of this machine, or ``"ray"`` actors of a cluster: the one
            that this program has joined, else one of this machine.
        workers: Worker processes or actors.

    Raises:
        BadInputError: If there is no such name.
        MissingExtraError: If Ray is asked for and not installed.
    """
    if name == "threads":
        return LocalEnvs
    if name == "processes":
        return partial(RemoteEnvs, start=ProcessLink, workers=workers)
    if name == "ray":
        require("ray", "ray")
        return partial(RemoteEnvs, start=RayLink, workers=workers)
    raise unknown_name("executor", name, EXECUTORS)


class ProcessLink:
    """A worker in a process of its own on this machine."""

    def __init__(self) -> None:
        """Start it and wait until it listens."""
        self.is_alive = True
        self._folder = tempfile.mkdtemp(prefix="trace_gym_")
        self._address = str(Path(self._folder) / "worker")
        self._free: list[Connection[Any, Any]] = []
        code = "import sys; from trace_gym.executor import serve; serve(sys.argv[1])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt is for this process, which then ends the worker
        )
        if self._process.stdout is None or not self._process.stdout.readline():
            self.close()
            raise InfrastructureError("worker_died", "a worker process for environments ended before it was ready")

    def request(self, call: bytes) -> bytes:
        """Return the worker's answer, see `Link`."""
        try:
            try:
                connection = self._free.pop()
            except IndexError:
                connection = Client(self._address, "AF_UNIX")
            connection.send_bytes(call)
            reply = connection.recv_bytes()
        except (OSError, EOFError) as error:
            self.is_alive = False
            raise InfrastructureError("worker_died", f"worker process {self._process.pid} is gone") from error
        self._free.append(connection)
        return reply

    def close(self) -> None:
        """End the process; it closes its environments."""
        self.is_alive = False
        while self._free:
            self._free.pop().close()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RayLink:
    """A worker in a Ray actor."""

    def __init__(self) -> None:
        """Start it; Ray is started on this machine unless this program has joined a cluster."""
        self._ray = require("ray", "ray")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self.is_alive = True
        self._actor = self._ray.remote(Worker).options(max_concurrency=_CALLS).remote()

    def request(self, call: bytes) -> bytes:
        """Return the worker's answer, see `Link`."""
        try:
            reply: bytes = self._ray.get(self._actor.answer.remote(call))
        except self._ray.exceptions.RayError as error:
            self.is_alive = False
            raise InfrastructureError("worker_died", f"a Ray actor is gone: {error}") from error
        return reply

    def close(self) -> None:
        """End the actor; it closes its environments."""
        if self.is_alive:
            self.is_alive = False
            self._ray.wait([self._actor.end.remote()], timeout=_END_S)
            self._ray.kill(self._actor)


def serve(address: str) -> None:
    """Be a worker process: answer connections to a Unix socket until the standard input ends."""
    worker = Worker()
    listener = Listener(address, "AF_UNIX")

    def talk(connection: Connection[Any, Any]) -> None:
        try:
            while True:
                connection.send_bytes(worker.answer(connection.recv_bytes()))
        except (EOFError, OSError):
            connection.close()

    def listen() -> None:
        while True:
            threading.Thread(target=talk, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads what an environment prints
    sys.stdin.read()
    worker.end()


class _States:
    """The live states that a worker has sent, by their bytes; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, EnvState] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, data: bytes, state: EnvState) -> None:
        with self._lock:
            self._known[data] = state
            self._known.move_to_end(data)
            while len(self._known) > KEPT_STATES:
                self._known.popitem(last=False)

    def get(self, data: bytes) -> EnvState:
        with self._lock:
            state = self._known.get(data)
        return state or EnvState.from_bytes(data)


class _Pickler(pickle.Pickler):
    """Writes states as their bytes."""

    def __init__(self, file: io.BytesIO, states: _States | None) -> None:
        super().__init__(file)
        self._states = states

    def persistent_id(self, obj: Any) -> bytes | None:
        if not isinstance(obj, EnvState):
            return None
        data = obj.to_bytes()
        if self._states is not None:
            self._states.add(data, obj)
        return data


class _Unpickler(pickle.Unpickler):
    """Reads states from their bytes, or finds the live ones."""

    def __init__(self, file: io.BytesIO, states: _States | None) -> None:
        super().__init__(file)
        self._states = states

    def persistent_load(self, pid: bytes) -> EnvState:
        return EnvState.from_bytes(pid) if self._states is None else self._states.get(pid)


def _dump(value: object, states: _States | None = None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, states).dump(value)
    return file.getvalue()


def _load(data: bytes, states: _States | None = None) -> Any:
    return _Unpickler(io.BytesIO(data), states).load()
