"""What a state of BFCLMultiTurn costs, and how fast the environment steps.

Run by hand: ``python tests/benchmarks/bfcl.py [--quick]``. The ground truths are played through the text interface, one
call a step, under the wrappers that `gymnasium.make` puts on. Times are of this process on a core, not of the clock,
and each is the least of several rounds, so that other work on the machine counts little; the cyclic garbage collector
is off. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium

import trace_gym
from trace_gym.envs.bfcl.executor import Instances
from trace_gym.snapshot import load_state, save_state

ENV_ID = "trace_gym/BFCLMultiTurn-v0"
LIMITS = {"save_us": 100.0, "load_us": 150.0, "deepcopy_over_save_and_load": 5.0, "steps_per_s_saved": 8_000.0}


def least(rounds: int, call: Callable[[], Any]) -> float:
    """Return the least time of a call in microseconds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time_ns()
        call()
        best = min(best, time.process_time_ns() - began)
    return best / 1000


def record(every: int) -> dict[str, list[str]]:
    """Play the demonstrations; return the actions of each task, all of them rewarded."""
    env = gymnasium.make(ENV_ID, subset="all", split="all", tool_doc="compact", demonstrator_skill=1.0)
    found = {}
    for task_id in env.unwrapped.task_ids[::every]:  # type: ignore[attr-defined]
        _, info = env.reset(seed=0, options={"task_id": task_id})
        actions: list[str] = []
        over, reward = False, 0.0
        while not over:
            actions.append(info["demonstration"])
            _, reward, terminated, truncated, info = env.step(actions[-1])
            over = terminated or truncated
        if reward != 1.0:
            raise RuntimeError(f"The ground truth of {task_id} was not rewarded: {info.get('error_type')}.")
        found[task_id] = actions
    return found


def play(env: Any, task_id: str, actions: list[str], saved: bool) -> list[int]:
    """Play an episode; with ``saved`` its state is saved and put back before every step. Return nanoseconds by step."""
    marks = [time.process_time_ns()]
    env.reset(seed=0, options={"task_id": task_id})
    marks.append(time.process_time_ns())
    for action in actions:
        if saved:
            load_state(env, save_state(env))
        env.step(action)
        marks.append(time.process_time_ns())
    return [end - start for start, end in pairwise(marks)]


def speed(env: Any, episodes: dict[str, list[str]], rounds: int, saved: bool) -> float:
    """Return steps per second, resets included; every step counts with its least time."""
    total = 0
    for task_id, actions in episodes.items():
        runs = [play(env, task_id, actions, saved) for _ in range(rounds)]
        total += sum(min(times) for times in zip(*runs, strict=True))
    return 1e9 * sum(map(len, episodes.values())) / total


def upstreams(instances: Instances) -> dict[str, Any]:
    """Return simulators as upstream has them, with a generator of the standard library in each."""
    found = copy.deepcopy(instances.by_class)
    for simulator in found.values():
        if hasattr(simulator, "_random"):
            simulator._random = random.Random(0)
    return found


def turn_costs(env: Any, rounds: int) -> dict[str, float]:
    """Return what is done with the state at this turn boundary, in microseconds."""
    state = save_state(env)
    data = state.to_bytes()
    instances = Instances.loads(env.unwrapped._current().world.instances)
    original = upstreams(instances)
    calls: dict[str, Callable[[], Any]] = {
        "save_state": lambda: save_state(env),
        "load_state": lambda: load_state(env, state),
        "pickle and unpickle the simulators": lambda: Instances.loads(instances.dumps()),
        "copy.deepcopy of the simulators": lambda: copy.deepcopy(instances.by_class),
        "copy.deepcopy of upstream's": lambda: copy.deepcopy(original),
        "save_state, to_bytes": lambda: save_state(env).to_bytes(),
        "from_bytes, load_state": lambda: load_state(env, trace_gym.EnvState.from_bytes(data)),
    }
    return {name: least(rounds, call) for name, call in calls.items()}


def costs(env: Any, episodes: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Return the costs at every turn boundary."""
    times: dict[str, list[float]] = defaultdict(list)
    for task_id, actions in episodes.items():
        env.reset(seed=0, options={"task_id": task_id})
        for action in actions:
            *_, info = env.step(action)
            if "turn_end_reason" in info:
                for name, micros in turn_costs(env, rounds).items():
                    times[name].append(micros)
    return times


def main() -> int:
    """Print the table and the numbers with their limits; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one task in twenty-one, under a minute")
    quick = parser.parse_args().quick
    episodes = record(21 if quick else 1)
    rounds = 9
    env = gymnasium.make(ENV_ID, subset="all", split="all")
    gc.disable()
    found = {
        "steps_per_s": speed(env, episodes, rounds, saved=False),
        "steps_per_s_saved": speed(env, episodes, rounds, saved=True),
    }
    times = costs(env, episodes, rounds)
    gc.enable()
    print(
        f"{len(episodes)} ground truths, {sum(map(len, episodes.values()))} steps, {len(times['save_state'])} turns\n"
    )
    print(f"{'microseconds':34} {'median':>9} {'p99':>9} {'max':>9}")
    for name, values in times.items():
        values.sort()
        print(f"{name:34} {statistics.median(values):9.1f} {values[int(0.99 * len(values))]:9.1f} {values[-1]:9.1f}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    found |= {"save_us": medians["save_state"], "load_us": medians["load_state"]}
    both = found["save_us"] + found["load_us"]
    found["deepcopy_over_save_and_load"] = medians["copy.deepcopy of upstream's"] / both
    missed = []
    for name, limit in LIMITS.items():
        is_kept = found[name] <= limit if name.endswith("_us") else found[name] >= limit
        missed += [] if is_kept else [name]
    print(json.dumps({**{name: round(value, 2) for name, value in found.items()}, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
