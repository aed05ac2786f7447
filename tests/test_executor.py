"""Laws of executors: wherever environments live, they play the same; a worker that dies takes no run with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from operator import methodcaller
from typing import Any

import gymnasium
import pytest

from trace_gym.agents.scripted import ScriptedAgent
from trace_gym.allocation import get_allocator
from trace_gym.collect import Collector
from trace_gym.errors import BadInputError, InfrastructureError, TraceGymError
from trace_gym.executor import get_executor, run_in
from trace_gym.predictor import PosteriorPredictor
from trace_gym.snapshot import load_state, save_state

MATH = partial(
    gymnasium.make, "trace_gym.envs:trace_gym/MathCode-v0", disable_env_checker=True, size=15, demonstrator_skill=0.6
)
TASKS = ["chain-2-train-000000", "chain-2-train-000001"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")


def collector(executor: Any) -> Collector:
    allocator, predictor = get_allocator("treepo"), PosteriorPredictor()
    return Collector(MATH, ScriptedAgent(), allocator=allocator, predictor=predictor, expansions=2, executor=executor)


def grow(name: str) -> list[Any]:
    with collector(get_executor(name, workers=2)) as made:
        collection = asyncio.run(made.grow(TASKS, [3, 2]))
    assert collection.cost.continuations
    return [(tree.env_id, tree.task_id, tree.nodes) for tree in collection.trees]


@pytest.mark.slow
def test_worker_processes_play_the_same_trees() -> None:
    """Resets, turns, states and continuations in two workers equal those in this process."""
    assert grow("processes") == grow("threads")


@pytest.mark.slow
def test_ray_actors_play_the_same_trees() -> None:
    """The same over Ray, on a cluster of this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    try:
        assert grow("ray") == grow("threads")
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_worker_that_dies_is_a_failure_of_infrastructure_and_is_replaced() -> None:
    """Its environments are gone; their states are not, and go on in the next worker."""
    envs = get_executor("processes", workers=1)(MATH)
    first = envs.make()
    state = run_in(first, save_state) if run_in(first, methodcaller("reset", seed=3)) else None
    os.kill(first._link._process.pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="worker_died"):
        run_in(first, save_state)
    first.close()
    second = envs.make()
    run_in(second, load_state, state)
    assert run_in(second, save_state) == state
    with pytest.raises(TraceGymError, match="NoSuchThing"):
        run_in(second, methodcaller("NoSuchThing"))
    second.close()
    envs.close()


@pytest.mark.slow
def test_a_round_survives_the_death_of_a_worker() -> None:
    """What it played has failed, and is scored nowhere; the next round has a new worker."""
    with collector(get_executor("processes", workers=1)) as made:
        asyncio.run(made.grow(TASKS, [1, 1]))
        os.kill(made._pool.idle[0]._link._process.pid, signal.SIGKILL)
        broken = asyncio.run(made.grow(TASKS, [1, 1], step=1))
        healed = asyncio.run(made.grow(TASKS, [1, 1], step=2))
    failures = [node.failure.kind for tree in broken.trees for node in tree.nodes if node.failure]
    assert set(failures) == {"worker_died"}
    assert not any(node.failure for tree in healed.trees for node in tree.nodes)


def test_what_cannot_reach_another_process_is_refused() -> None:
    with pytest.raises(BadInputError, match="cannot be pickled"):
        get_executor("processes")(lambda: MATH())
    with pytest.raises(BadInputError, match="at least 1 worker"):
        get_executor("processes", workers=0)(MATH)
    with pytest.raises(BadInputError, match="Did you mean 'processes'"):
        get_executor("process")
