"""The laws of an environment that can be copied mid-episode, one sentence each, and a checker that plays them.

`check_snapshot` is to snapshots what `gymnasium.utils.env_checker.check_env` is to the interface: run it on an
environment of your own, with the wrappers you use, before you trust its clones.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from trace_gym.errors import BadInputError, StateError
from trace_gym.snapshot import EnvState, clone, load_state, save_state

AnyEnv = gymnasium.Env[Any, Any]

HOSTILE = (
    "",
    "\x00",
    "<tool_call>",
    '<tool_call>\n{"name": "nope"}\n</tool_call>',
    "\\boxed{" * 50,
    "\ud800",
    "]" * 999,
)

_CHILD = """
import json, sys, gymnasium, trace_gym
from trace_gym.snapshot import EnvState, load_state
job = json.load(sys.stdin)
env = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(job["spec"]))
load_state(env, EnvState.from_bytes(job["state"].encode()))
print(repr(env.step(job["action"])))
env.close()
"""


@dataclass(frozen=True, slots=True)
class Law:
    """One law and whether it held.

    Attributes:
        sentence: The law.
        holds: Whether it held; None if it could not be checked here.
        detail: What was seen, where it did not hold or was not checked.
    """

    sentence: str
    holds: bool | None
    detail: str = ""

    def __str__(self) -> str:
        """Return one line."""
        mark = {True: "holds", False: "BROKEN", None: "not checked"}[self.holds]
        return f"{mark:<11}  {self.sentence}" + (f"  [{self.detail}]" if self.detail else "")


class _Broken(Exception):
    """A law did not hold."""


class _NotChecked(Exception):
    """A law cannot be checked on this machine or environment."""


def check_snapshot(
    env: AnyEnv, actions: Sequence[Any] | None = None, *, cycles: int = 1000, seed: int = 0
) -> list[Law]:
    """Play an environment and say which laws of a snapshot-able environment hold.

    Args:
        env: The environment with its wrappers; it is reset and stepped, and stays open.
        actions: An episode to play from ``reset(seed=seed)``; by default the demonstrations in
            ``info["demonstration"]`` if there are any, else random actions.
        cycles: How often the leak test saves, restores and clones.
        seed: Seed of the episode.

    Returns:
        Every law with its verdict; ``all(law.holds is not False for law in laws)`` is the pass.

    Raises:
        BadInputError: If the episode has no step to check.
    """
    checker = _Checker(env, actions, cycles, seed)
    return [checker.judge(law) for law in checker.laws()]


class _Checker:
    def __init__(self, env: AnyEnv, actions: Sequence[Any] | None, cycles: int, seed: int) -> None:
        self.env = env
        self.cycles = cycles
        self.seed = seed
        self.actions = list(actions) if actions is not None else self.play_once()
        if not self.actions:
            raise BadInputError("Need at least one action to check the laws; got none.")

    def laws(self) -> Iterator[Callable[[], None]]:
        names = [name for name in vars(type(self)) if name.startswith("law_")]
        yield from (getattr(self, name) for name in names)

    def judge(self, law: Callable[[], None]) -> Law:
        sentence = " ".join((law.__doc__ or "").split())
        try:
            law()
        except _NotChecked as reason:
            return Law(sentence, None, str(reason))
        except Exception as error:  # a law that raises is broken, whatever it raised
            detail = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
            return Law(sentence, False, detail[:400])
        return Law(sentence, True)

    # The laws, in the order in which they are printed. The docstring is the law.

    def law_interface(self) -> None:
        """Gymnasium's own checker passes without a warning."""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("error")
            twin = clone(self.env)[0]
            check_env(twin.unwrapped, skip_render_check=self.env.spec is None, skip_close_check=True)
            twin.close()

    def law_seed(self) -> None:
        """The same seed gives the same task, the same world and the same episode."""
        first, second = self.episode(self.env), self.episode(self.env)
        self.equal(first, second, "two episodes with one seed")

    def law_global_rng(self) -> None:
        """No global random generator is touched."""
        before = random.getstate(), repr(np.random.get_state())  # noqa: NPY002 - we look, we do not draw
        self.episode(self.env)
        if before != (random.getstate(), repr(np.random.get_state())):  # noqa: NPY002
            raise _Broken("random or numpy.random moved during an episode")

    def law_save_is_silent(self) -> None:
        """Saving leaves the episode as it was."""
        self.equal(self.episode(self.env), self.episode(self.env, save=True), "with and without saving")

    def law_restore(self) -> None:
        """The steps after a restore equal the uninterrupted run, at every turn."""
        states, results = self.states()
        for turn, state in enumerate(states[:-1]):
            load_state(self.env, state)
            self.equal(self.rest(self.env, turn), results[turn:], f"restored at turn {turn}")

    def law_key(self) -> None:
        """A restored environment saves an equal state, and different turns have different keys."""
        states, _ = self.states()
        for turn, state in enumerate(states):
            load_state(self.env, state)
            if save_state(self.env).key != state.key:
                raise _Broken(f"restoring and saving at turn {turn} gave another key")
        if len({state.key for state in states}) != len(states):
            raise _Broken("two turns of one episode have equal keys")

    def law_immutable(self) -> None:
        """A state does not change while the environment goes on."""
        states, _ = self.states()
        before = [state.to_bytes() for state in states]
        self.rest_from(self.env, states[0])
        if [state.to_bytes() for state in states] != before:
            raise _Broken("the bytes of a saved state changed")

    def law_clones(self) -> None:
        """Stepping a clone leaves its parent and its siblings unchanged."""
        load_state(self.env, self.states()[0][-2])
        before = save_state(self.env).key
        first, second = clone(self.env, 2)
        first.step(self.actions[-1])
        keys = [save_state(env).key for env in (self.env, second)]
        first.close()
        second.close()
        if keys != [before, before]:
            raise _Broken("a step in a clone changed its parent or sibling")

    def law_two_restores(self) -> None:
        """Two restores of one state share nothing mutable."""
        state = self.states()[0][-2]
        twin = clone(self.env)[0]
        load_state(self.env, state)
        load_state(twin, state)
        twin.step(self.actions[-1])
        key = save_state(self.env).key
        twin.close()
        if key != state.key:
            raise _Broken("a step in one restored environment changed the other")

    def law_bytes(self) -> None:
        """A state's bytes restore the same state here."""
        for turn, state in enumerate(self.states()[0]):
            load_state(self.env, EnvState.from_bytes(state.to_bytes()))
            if save_state(self.env).key != state.key:
                raise _Broken(f"bytes of turn {turn} restored another state")

    def law_fresh_process(self) -> None:
        """A state's bytes restore in a fresh process, and the next step is the same there."""
        if self.env.spec is None:
            raise _NotChecked("the environment was not made by gymnasium.make")
        states, results = self.states()
        state = states[-2]
        job = {
            "spec": self.env.spec.to_json(),
            "state": state.to_bytes().decode(),
            "action": self.actions[-1],
        }
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], input=json.dumps(job), capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise _Broken(f"the process failed: {done.stderr.strip().splitlines()[-1:]}")
        if done.stdout.strip() != repr(results[-1]):
            raise _Broken(f"it answered {done.stdout.strip()[:200]}")

    def law_reseed(self) -> None:
        """A restore replays exactly; with reseed the random streams are others, and equal for equal seeds."""
        state = self.states()[0][0]
        keys = []
        for reseed in (None, 1, 1, 2):
            load_state(self.env, state, reseed=reseed)
            keys.append(save_state(self.env).key)
        if keys[0] != state.key or keys[1] != keys[2] or len(set(keys)) != 3:
            raise _Broken("keys after reseed None, 1, 1, 2 are " + ", ".join(key[:6] for key in keys))

    def law_parent_closes_first(self) -> None:
        """A clone lives on after its parent was closed."""
        states, results = self.states()
        parent = clone(self.env)[0]
        load_state(parent, states[-2])
        child = clone(parent)[0]
        parent.close()
        result = child.step(self.actions[-1])
        child.close()
        self.equal([result], results[-1:], "a clone whose parent was closed")

    def law_wrappers(self) -> None:
        """Wrapper state is part of the state: a time limit truncates at the same turn after a restore."""
        limited: AnyEnv = gymnasium.wrappers.TimeLimit(clone(self.env)[0], max_episode_steps=2)
        limited.reset(seed=self.seed)
        state = save_state(limited)
        truncated = []
        for _ in range(3):
            load_state(limited, state)
            truncated.append(limited.step(self.actions[0])[3])
        limited.close()
        if any(truncated):
            raise _Broken(f"truncated after one step: {truncated}")

    def law_foreign_state(self) -> None:
        """A state of another environment or schema is refused with a StateError."""
        state = self.states()[0][0]
        foreign = EnvState("other/Env-v0", state.task_id, state.data, state.wrappers)
        for call in (
            lambda: load_state(self.env, foreign),
            lambda: EnvState.from_bytes(b"junk"),
            lambda: EnvState.from_bytes(b'{"schema": -1}'),
        ):
            try:
                call()
            except StateError:
                continue
            raise _Broken("a foreign state was accepted")

    def law_copy(self) -> None:
        """copy.copy raises; copy.deepcopy is an independent clone."""
        try:
            copy.copy(self.env.unwrapped)
        except TypeError:
            pass
        else:
            raise _Broken("copy.copy gave an environment that shares its episode")
        twin = copy.deepcopy(self.env)
        same = save_state(twin).key == save_state(self.env).key
        twin.close()
        if not same:
            raise _Broken("a deep copy saves another state")

    def law_hostile_actions(self) -> None:
        """No text raises: a malformed action is a turn like any other."""
        if not isinstance(self.env.action_space, gymnasium.spaces.Text):
            raise _NotChecked("actions are no text")
        for action in HOSTILE:
            self.env.reset(seed=self.seed)
            observation, *_ = self.env.step(action)
            if not self.env.observation_space.contains(observation):
                raise _Broken(f"after {action[:20]!r} the observation is outside its space")

    def law_leaks(self) -> None:
        """Saving, restoring, cloning and closing over and over leaves no process and no descriptor."""
        if not Path("/proc/self/fd").exists():
            raise _NotChecked("needs /proc")
        states, _ = self.states()
        self.cycle(states, 3)
        before = _resources()
        self.cycle(states, self.cycles)
        after = _resources()
        if any(after[name] > before[name] for name in before):
            raise _Broken(f"before {before}, after {self.cycles} cycles {after}")

    # Tools of the laws.

    def play_once(self) -> list[Any]:
        _, info = self.env.reset(seed=self.seed)
        self.env.action_space.seed(self.seed)
        actions: list[Any] = []
        over = False
        while not over and len(actions) < 20:
            actions.append(info.get("demonstration", self.env.action_space.sample()))
            _, _, terminated, truncated, info = self.env.step(actions[-1])
            over = terminated or truncated
        return actions

    def episode(self, env: AnyEnv, save: bool = False) -> list[Any]:
        results: list[Any] = [env.reset(seed=self.seed)]
        for action in self.actions:
            if save:
                save_state(env)
            results.append(env.step(action))
        return results

    def states(self) -> tuple[list[EnvState], list[Any]]:
        """Play the episode; return the state before each step and after the last, and the steps' results."""
        self.env.reset(seed=self.seed)
        states, results = [save_state(self.env)], []
        for action in self.actions:
            results.append(self.env.step(action))
            states.append(save_state(self.env))
        return states, results

    def rest(self, env: AnyEnv, turn: int) -> list[Any]:
        return [env.step(action) for action in self.actions[turn:]]

    def rest_from(self, env: AnyEnv, state: EnvState) -> list[Any]:
        load_state(env, state)
        return self.rest(env, 0)

    def cycle(self, states: Sequence[EnvState], times: int) -> None:
        for i in range(times):
            load_state(self.env, states[i % len(states)])
            twin = clone(self.env)[0]
            save_state(twin)
            twin.close()

    @staticmethod
    def equal(left: Any, right: Any, what: str) -> None:
        # repr: results are plain data, and NaN must equal itself.
        if repr(left) != repr(right):
            where = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if repr(a) != repr(b)), "?")
            raise _Broken(f"{what}: step {where} differs")


def _resources() -> dict[str, int]:
    """Count this process' open descriptors and its living descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, queue = 0, [os.getpid()]
    while queue:
        mine = children.get(queue.pop(), [])
        found += len(mine)
        queue += mine
    return {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "processes": found}
