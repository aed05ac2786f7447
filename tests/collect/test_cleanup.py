"""Nothing is left behind: environments are closed, used again, given up; processes and threads end."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import pytest
from process_tree import descendants, eventually
from walk import TASKS, Talker, Walk, collector, grow, leaves

from trace_gym.agents.scripted import ScriptedAgent
from trace_gym.messages import Completion


def test_every_environment_is_closed_and_used_again():
    """As many are made as branches run side by side; closing twice is fine."""
    envs, closed = [], []

    def make_env():
        envs.append(Walk(lambda event, subject: closed.append(subject) if event == "close" else None))
        return envs[-1]

    with collector(make_env=make_env, expansions=2) as made:
        for step in range(3):
            asyncio.run(made.grow(TASKS, (2, 2, 2), step=step))
        assert len(envs) <= 12 and not closed
    made.close()
    assert len(envs) == len(closed)


def test_a_given_up_environment_is_closed_again_when_its_call_returns(gate):
    """The call may have opened something after the first closing."""
    closed = threading.Semaphore(0)
    env = None

    def hook(event, subject):
        if event == "close" and subject is env:
            closed.release()
        if event == "step":
            gate.wait(30)

    def make_env():
        nonlocal env
        env = Walk(hook)
        return env

    grow(("a",), (1,), make_env=make_env, step_timeout_s=0.1)
    assert closed.acquire(timeout=2) and not closed.acquire(blocking=False)
    gate.set()
    assert closed.acquire(timeout=2)


@pytest.mark.slow
def test_closing_does_not_wait_for_what_hangs(gate):
    """Neither for a step nor for the closing of an environment."""

    def hook(event, subject):
        if event in ("step", "close"):
            gate.wait(30 if event == "step" else 10)

    made = collector(make_env=lambda: Walk(hook), step_timeout_s=0.1)
    asyncio.run(made.grow(("a", "b"), (1, 1)))
    start = time.perf_counter()
    made.close()
    assert time.perf_counter() - start < 4


INTERRUPTED = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
sys.path.insert(0, {folder!r})
from walk import TASKS, Talker, Walk, collector
from trace_gym.batching import run_to_end
def hook(event, subject):
    if event == "step":
        sys.stdout.write("hangs\\n")
        threading.Event().wait()
with collector(Talker({batched}), lambda: Walk(hook), workers=2) as made:
    try:
        run_to_end(made.grow(TASKS, (2, 2, 2)))
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_an_interrupt_ends_the_program_although_steps_hang(batched):
    """Ctrl-C reaches the caller, and no thread keeps the interpreter from ending."""
    code = INTERRUPTED.format(folder=str(Path(__file__).parent.parent), batched=batched)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert "interrupted\n" in out and err == "" and process.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_a_given_up_math_code_leaves_no_process_behind():
    """A cell that outlasts the deadline of a step ends with its environment."""
    before = descendants()

    class Endless(Talker):
        def answer(self, request):
            cell = json.dumps({"name": "python", "arguments": {"code": "while True: pass"}})
            return Completion(f"<tool_call>{cell}</tool_call>", num_tokens=1)

    def make_env():
        return gymnasium.make("trace_gym/MathCode-v0", size=15, cell_timeout_s=40.0)

    with collector(Endless(), make_env, encoder=None, step_timeout_s=3.0) as made:
        collection = asyncio.run(made.grow(["chain-2-train-000000"], [2]))
    assert [node.failure.kind for node in leaves(collection)] == ["deadline"] * 2
    assert eventually(lambda: descendants() <= before, 5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_math_code_leaves_no_process_behind():
    """The scripted demonstrator solves everything, continuations included; closing ends the tool."""
    before = descendants()

    def make_env():
        return gymnasium.make("trace_gym/MathCode-v0", size=30, demonstrator_skill=1.0, cell_timeout_s=20.0)

    with collector(ScriptedAgent(), make_env, encoder=None, expansions=2, keep_states=True) as made:
        with make_env() as env:
            tasks = [task for task in env.unwrapped.task_ids if "-2-" in task][:2]
        collection = asyncio.run(made.grow(tasks, [2, 2]))
        assert descendants() - before
        assert collection.cost.continuations > 0
        assert {node.reward for node in leaves(collection)} == {1.0}
        assert {tree.env_id for tree in collection.trees} == {"trace_gym/MathCode-v0"}
    del collection
    gc.collect()
    assert eventually(lambda: descendants() <= before, 5)
