"""The state contract: save, load and clone a running environment at any turn.

`EnvState` is an immutable value that belongs to the caller. `save_state`, `load_state` and `clone` take the whole
wrapper stack: `gymnasium.wrappers.TimeLimit` and its kin keep counters outside the base environment, and restoring the
base alone would truncate at the wrong turn.

A state carries data (plain JSON, hashed into `EnvState.key`; written only when somebody asks, where that takes longer
than a turn) and, inside the process that made it, an optional live handle that makes a restore cheap. Bytes hold the
data only; they are JSON, never a pickle.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np

from trace_gym.errors import BadInputError, StateError

SCHEMA = 1
_SCALARS = frozenset((type(None), bool, int, float, str))
# What a wrapper was made with, and what it keeps of that.
_CONSTRUCTED = frozenset(("env", "_saved_kwargs", "_cached_spec", "_metadata", "_action_space", "_observation_space"))
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))

AnyEnv = gymnasium.Env[Any, Any]
Fields = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class EnvState:
    """Everything that a restored environment needs to go on exactly as the saved one would.

    Attributes:
        env_id: Id or class name of the environment.
        task_id: The task that is played.
        content: The `data`, or a function that writes it from values that nobody changes any more.
        wrappers: For each wrapper, outermost first, its name and its own state: canonical JSON, or names and values
            of fields that are mere numbers and words.
        live: Handle that makes a restore cheap in the process that saved the state; not part of its value.
    """

    env_id: str
    task_id: str
    content: str | Callable[[], str] = field(repr=False)
    wrappers: tuple[tuple[str, str | Fields], ...] = ()
    live: object = field(default=None, repr=False)

    @cached_property
    def data(self) -> str:
        """Canonical JSON of the environment's state, random generator included."""
        return self.content if isinstance(self.content, str) else self.content()

    @cached_property
    def key(self) -> str:
        """Content hash: equal keys mean equal futures for equal actions."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same state; the live handle does not count."""
        return isinstance(other, EnvState) and self._canonical() == other._canonical()

    def __hash__(self) -> int:
        """Return a hash of the content."""
        return hash(self.key)

    def to_bytes(self) -> bytes:
        """Return the state as bytes that restore in any process."""
        return self._canonical().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> EnvState:
        """Read what `to_bytes` wrote.

        Raises:
            StateError: If the bytes are not a state of this schema.
        """
        try:
            raw = json.loads(data)
            if raw["schema"] != SCHEMA:
                raise StateError(f"State has schema {raw['schema']}; this version reads schema {SCHEMA}.")
            wrappers = tuple((str(name), str(value)) for name, value in raw["wrappers"])
            return cls(str(raw["env_id"]), str(raw["task_id"]), str(raw["data"]), wrappers)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"These {len(data)} bytes are not an environment state: {error!r}.") from error

    def _canonical(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "env_id": self.env_id,
                "task_id": self.task_id,
                "data": self.data,
                "wrappers": [(name, w if isinstance(w, str) else encode(dict(w))) for name, w in self.wrappers],
            },
            separators=(",", ":"),
        )


@runtime_checkable
class Snapshotable(Protocol):
    """What a base environment offers."""

    def get_state(self) -> EnvState:
        """Return the state; it shares nothing mutable with the environment."""
        ...

    def set_state(self, state: EnvState, reseed: int | None = None) -> None:
        """Go on from a state; ``reseed`` starts an independent random stream."""
        ...

    def info(self) -> dict[str, Any]:
        """Return the info of the current turn, as `step` last returned it."""
        ...


def save_state(env: AnyEnv) -> EnvState:
    """Return the state of an environment with all its wrappers.

    Raises:
        StateError: If the base environment has no `get_state`, or a wrapper holds state of an unknown kind.
    """
    wrappers = tuple((type(w).__name__, _wrapper_state(w)) for w in _wrappers(env))
    state = _base(env).get_state()
    return EnvState(state.env_id, state.task_id, state.content, wrappers, state.live)


def load_state(env: AnyEnv, state: EnvState, reseed: int | None = None) -> None:
    """Put an environment with all its wrappers back to a state.

    Args:
        env: The environment, wrapped like the one that was saved.
        state: What `save_state` returned, here or in another process.
        reseed: Seed of an independent continuation; None replays the saved random stream exactly.

    Raises:
        StateError: If the state belongs to another environment or another wrapper stack.
    """
    wrappers = _wrappers(env)
    names = [type(w).__name__ for w in wrappers]
    saved = [name for name, _ in state.wrappers]
    if names != saved:
        raise StateError(
            f"The state was saved under the wrappers {saved}; this environment has {names}. "
            "Wrap it the same way, or use env.unwrapped.get_state/set_state on both sides."
        )
    bare = EnvState(state.env_id, state.task_id, state.content, live=state.live)
    _base(env).set_state(bare, reseed=reseed)
    for wrapper, (_, data) in zip(wrappers, state.wrappers, strict=True):
        _set_wrapper_state(wrapper, decode(data) if isinstance(data, str) else dict(data))


def clone(env: AnyEnv, n: int = 1) -> list[AnyEnv]:
    """Return ``n`` independent copies of a running environment, wrappers included.

    Raises:
        BadInputError: If ``n`` is negative.
    """
    if n < 0:
        raise BadInputError(f"The number of clones must not be negative; got {n}.")
    return [copy.deepcopy(env) for _ in range(n)]


def encode(value: object) -> str:
    """Return canonical JSON of plain data; deques, tuples, arrays and generators are tagged.

    Raises:
        StateError: If the value holds something that is not data.
    """
    return _CANONICAL.encode(_pack(value))


def decode(text: str) -> Any:
    """Read what `encode` wrote."""
    return _unpack(json.loads(text))


def rng_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return a generator's state as plain data."""
    return cast(dict[str, Any], copy.deepcopy(rng.bit_generator.state))


def rng_from_state(state: Mapping[str, Any]) -> np.random.Generator:
    """Return a generator that goes on from a state.

    Raises:
        StateError: If the state names an unknown bit generator.
    """
    kinds = {"PCG64": np.random.PCG64, "PCG64DXSM": np.random.PCG64DXSM, "Philox": np.random.Philox}
    name = state.get("bit_generator")
    if name not in kinds:
        raise StateError(f"Unknown bit generator {name!r}; known: {', '.join(kinds)}.")
    bits = kinds[str(name)]()
    bits.state = dict(state)
    return np.random.Generator(bits)


def _wrappers(env: AnyEnv) -> list[gymnasium.Wrapper[Any, Any, Any, Any]]:
    found: list[gymnasium.Wrapper[Any, Any, Any, Any]] = []
    wrapper: Any = env
    base = env.unwrapped
    while wrapper is not base:  # PettingZoo's wrappers are of another class and of the same form
        found.append(wrapper)
        wrapper = wrapper.env
    return found


def _base(env: AnyEnv) -> Snapshotable:
    base = env.unwrapped
    kind: Any = type(base)
    if not _is_snapshotable(kind):
        raise StateError(
            f"{kind.__name__} has no get_state/set_state; derive it from trace_gym.envs.text_env.TextEnv "
            "or implement both."
        )
    return cast(Snapshotable, base)


@cache  # asking a protocol takes longer than saving a state
def _is_snapshotable(base: type) -> bool:
    return issubclass(base, Snapshotable)


def _wrapper_state(wrapper: gymnasium.Wrapper[Any, Any, Any, Any]) -> str | Fields:
    """Return a wrapper's own mutable attributes: its `get_state` if it has one, else its plain data."""
    if hasattr(type(wrapper), "get_state"):  # its own: wrappers do not pass on what the base class has
        return encode(cast(Any, wrapper).get_state())
    state = {k: v for k, v in vars(wrapper).items() if k not in _CONSTRUCTED and not _is_configuration(v)}
    if all(type(value) in _SCALARS for value in state.values()):
        return tuple(state.items())
    try:
        return encode(state)
    except StateError:
        for name, value in state.items():
            try:
                encode(value)
            except StateError as error:
                raise StateError(
                    f"Wrapper {type(wrapper).__name__} holds {name!r} of type {type(value).__name__}, which cannot be "
                    "saved. Give the wrapper get_state() and set_state(state)."
                ) from error
        raise


def _set_wrapper_state(wrapper: gymnasium.Wrapper[Any, Any, Any, Any], state: Any) -> None:
    if hasattr(type(wrapper), "set_state"):
        cast(Any, wrapper).set_state(state)
    else:
        vars(wrapper).update(state)


def _is_configuration(value: object) -> bool:
    if type(value) in _SCALARS:
        return False
    return callable(value) or isinstance(value, (gymnasium.Space, gymnasium.envs.registration.EnvSpec))


def _pack(value: Any) -> Any:
    """Turn data into JSON; every container but list and str-keyed dict becomes ``{"$kind": …}``."""
    if type(value) in _SCALARS or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        return {"$dict": [[_pack(k), _pack(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item) for item in value]}
    if isinstance(value, deque):
        return {"$deque": [_pack(item) for item in value], "maxlen": value.maxlen}
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.str, value.item()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufU":
        return {"$array": [value.dtype.str, list(value.shape), value.ravel().tolist()]}
    if isinstance(value, np.random.Generator):
        return {"$rng": _pack(rng_state(value))}
    raise StateError(f"A {type(value).__name__} is not plain data.")


def _unpack(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if "$dict" in value:
        return {_unpack(k): _unpack(v) for k, v in value["$dict"]}
    if "$tuple" in value:
        return tuple(_unpack(item) for item in value["$tuple"])
    if "$deque" in value:
        return deque([_unpack(item) for item in value["$deque"]], maxlen=value["maxlen"])
    if "$scalar" in value:
        dtype, item = value["$scalar"]
        return np.dtype(dtype).type(item)
    if "$array" in value:
        dtype, shape, items = value["$array"]
        return np.array(items, dtype=dtype).reshape(shape)
    if "$rng" in value:
        return rng_from_state(_unpack(value["$rng"]))
    raise StateError(f"Unknown tag in saved data: {sorted(value)}.")
