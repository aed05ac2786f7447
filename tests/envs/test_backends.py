"""The laws of the Python tool that hold whatever runs the cells; on real processes of every backend."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from process_tree import descendants, eventually, open_files

import trace_gym
from trace_gym.cli import main
from trace_gym.envs.math import PythonTool
from trace_gym.envs.math.python_tool import CellResult, State, capabilities, choice, choose_backend
from trace_gym.envs.math.python_tool import replay_backend as replay
from trace_gym.envs.math.python_tool.backend import Limits
from trace_gym.errors import BadInputError, MissingExtraError, ReplayDivergenceError, StateError

BACKENDS = capabilities().backends
# A plain process takes about a second to import what it needs.
PARAMS = [pytest.param(name, marks=pytest.mark.slow) if name == "replay" else name for name in BACKENDS]
needs_monty = pytest.mark.skipif("monty" not in BACKENDS, reason="pydantic-monty is not installed")
WEAK = {"allow_weak_isolation": True}  # so that the tests say the same on every machine
UNDONE = ("timeout", "memory", "killed")

# What every backend can run, monty's subset of Python too.
CELLS = (
    ("x = 3", "(no output)"),
    ("None", "(no output)"),
    ("", "(no output)"),
    ("# nothing", "(no output)"),
    ("print('a')\n2 + 2", "a\n4"),
    ("x = 5; x + 1", "6"),
    ("x = 5; x;", "(no output)"),
    ("terms = [4, 5]\nprint(\n    sum(terms)\n)", "9"),
    ("(1 +\n 2)  # three", "3"),
    ("print('ä ≤ 数')", "ä ≤ 数"),
    ("```python\nprint(6 * 9)\n```", "54"),
    ("    u = 5\n    u + 1", "6"),
    ("for i in range(3):\n    print(i, end=' ')", "0 1 2 "),
    ("sorted({'b', 'a'})", "['a', 'b']"),
    ("f'{0x7fffffff:#x}'", "'0x7fffffff'"),
    ("import math\nmath.factorial(20)", "2432902008176640000"),
    ("print('é' * 3)\nexit()\nprint('never')", "ééé\nexit() was called: the cell ended here, the session goes on."),
)
ERRORS = (
    ("a = 1\nprint(b)", "line 2: print(b)\nNameError: name 'b' is not defined"),
    ("1 / 0", "line 1: 1 / 0\nZeroDivisionError: division by zero"),
    (
        "def f(x):\n    return 1 / x\nf(0)",
        "line 3: f(0)\nline 2, in f: return 1 / x\nZeroDivisionError: division by zero",
    ),
    ("    z = 1\n    z / 0", "line 2: z / 0\nZeroDivisionError: division by zero"),
    ("raise KeyboardInterrupt", "line 1: raise KeyboardInterrupt\nKeyboardInterrupt"),
)


def show(state: State, code: str) -> str:
    return state.step(code)[0].text


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, PythonTool]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(PythonTool(backend=name, cell_timeout_s=20, output_chars=2000, **WEAK))
            for name in BACKENDS
        }


@pytest.fixture(params=PARAMS)
def tool(request: pytest.FixtureRequest, tools: dict[str, PythonTool]) -> PythonTool:
    return tools[request.param]


@pytest.fixture(params=PARAMS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- cells ---------------------------------------------------------------------------------------


def test_cells_show_the_same_on_every_backend(tool: PythonTool) -> None:
    """Values, prints and errors look alike, whoever ran the cell."""
    state = tool.new()
    for code, text in CELLS:
        result, state = state.step(code)
        assert (result.text, result.status) == (text, "ok"), code
    for code, text in ERRORS:
        result, state = state.step(code)
        assert (result.text, result.status) == (text, "error"), code


@pytest.mark.slow
@pytest.mark.skipif("fork" not in BACKENDS, reason="the one backend to compare with needs Linux")
def test_full_python_shows_the_same_by_fork_and_by_replay(tools: dict[str, PythonTool]) -> None:
    """One interpreter runs the cells of both; libraries, warnings, random numbers and hashes included."""
    cells = (
        "import numpy as np, sympy as sp, random\nx = sp.Symbol('x')\nsp.integrate(x * sp.exp(x), x)",
        "random.random(), np.random.rand(), np.random.default_rng().random()",
        "{'b', 'a', 'zz'}, hash('abc')",
        "import warnings\nwarnings.warn('careful')",
        "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(40)",
        "f(1)",
        "open('/etc/passwd').read()",
        "import subprocess\nsubprocess.run(['true'])",
        "import threading\nthreading.Thread(target=print).start()",
        "import matplotlib",
        "n = int(input())",
        "print('y' * 9000)\n'end'",
        "gen = (i for i in range(9))\nnext(gen)",
        "next(gen), __name__, object()",
    )
    shown = {}
    for name in ("fork", "replay"):
        state, shown[name] = tools[name].new(seed=3), []
        for code in cells:
            result, state = state.step(code)
            shown[name].append(result)
    for code, *results in zip(cells, shown["fork"], shown["replay"], strict=True):
        assert results[0] == results[1], code


def test_an_error_in_a_function_of_an_earlier_cell_names_that_cell(tool: PythonTool) -> None:
    """Frames of other cells are told apart; what lies between two cells does not shift the numbers."""
    _, state = tool.new().step("1 +")
    _, state = state.step("")
    _, state = state.step("def inverse(x):\n    return 1 / x", reseed=1)
    assert show(state, "2\ninverse(0)") == (
        "line 2: inverse(0)\ncell 3, line 2, in inverse: return 1 / x\nZeroDivisionError: division by zero"
    )


def test_long_output_keeps_both_ends(tool: PythonTool) -> None:
    """The result printed last survives the cut, and the model is told of the cut."""
    result, _ = tool.new().step("for i in range(3000):\n    print('line', i)\nprint('FINAL=42')")
    assert result.status == "truncated"
    assert result.text.startswith("line 0\nline 1\n") and result.text.endswith("FINAL=42")
    assert "bytes omitted" in result.text and len(result.text) < 2200


def test_a_cell_that_does_not_end_is_undone_and_what_it_printed_is_kept(backend: str) -> None:
    """A cell ends at its deadline whatever it does; the state before it is as good as before."""
    with PythonTool(backend=backend, cell_timeout_s=0.4, memory_mb=512, **WEAK) as tool:
        _, state = tool.new().step("x = 4")
        for code in (
            "for k in range(5):\n    print('k =', k)\nwhile True:\n    pass",
            "print('k = 4')\nwhile True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
        ):
            result, after = state.step(code)
            assert result.status == "timeout" and after is state, result
            assert "k = 4" in result.text and "longer than 0.4 s" in result.text
        result, after = state.step("print('on')\nx = 'a' * 10**12")
        assert result.status == "memory" and after is state
        assert result.text.startswith("on\n") and "512 MB" in result.text
        assert show(state, "x") == "4"


@pytest.mark.slow
def test_a_session_that_dies_or_lies_is_undone(tools: dict[str, PythonTool]) -> None:
    """A plain process that ends itself, or writes on the pipe of the tool, loses its cell and nothing else."""
    _, state = tools["replay"].new().step("x = 3")
    frame = "import os, json, struct\nb = json.dumps({'id': '1-00', 'status': 'ok'}).encode()\n"
    for code, reason in (
        ("import os\nprint('before')\nos._exit(3)", "exit code 3"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("import os\nos.closerange(0, 64)", "its own"),
        (f"{frame}for fd in range(3, 12):\n    try: os.write(fd, struct.pack('<I', len(b)) + b)\n"
         "    except OSError: pass", "the tool's own connection"),
        ("import os\nfor fd in range(3, 12):\n    try: os.write(fd, b'\\xff' * 99)\n    except OSError: pass",
         "the tool's own connection"),
    ):  # fmt: skip
        result, after = state.step(code)
        assert (result.status, after) == ("killed", state), (code, result)
        assert reason in result.text, (code, result)
        assert show(state, "x") == "3"


def test_code_that_is_no_text_or_much_too_long_is_answered(tool: PythonTool) -> None:
    """No cell raises, whatever is in it."""
    state = tool.new()
    for code in ("\0", "\ud800", "'\ud800'", "x = " + "(" * 5000, "9" * 5000, "-" * 20_000 + "1"):
        result, after = state.step(code)
        assert result.status == "error" and result.text, code[:20]
        assert show(after, "1") == "1"
    assert state.step("#" * 200_001)[0].status == "error"
    with pytest.raises(BadInputError, match="code must be a str"):
        state.step(b"x")  # type: ignore[arg-type]


# -- states --------------------------------------------------------------------------------------


def test_a_state_is_unchanged_by_the_steps_from_it(tool: PythonTool) -> None:
    """Stepping a state never shows in the state, its clones or its siblings."""
    _, base = tool.new().step("values = [1]")
    before = base.key
    left, right = base.clone(2)
    _, after = left.step("values.append(2)")
    assert show(after, "values") == "[1, 2]"
    assert show(right, "values") == show(base, "values") == "[1]"
    assert base.key == before != after.key
    assert [cell.code for cell in after.history] == ["values = [1]", "values.append(2)"]
    first = tool.new(seed=1)
    _, second = first.step("y = 20")
    first.close()
    (clone,) = second.clone()
    second.close()
    assert show(clone, "y + 1") == "21"
    with pytest.raises(StateError, match="closed"):
        second.step("y")


def test_equal_states_draw_equal_random_numbers_and_reseeded_ones_do_not(tool: PythonTool) -> None:
    """A step is a function of the prefix and the cell; a seed for the step makes it another."""
    draw = "print(random.random(), random.randint(1, 10**9))"
    _, state = tool.new(seed=5).step("import random\nn = random.random()")
    assert len({show(clone, draw) for clone in (*state.clone(1), state)}) == 1
    one, two = (show(clone, draw) for clone in state.clone(2, reseed=[1, 2]))
    result, after = state.step(draw, reseed=1)
    assert result.text == one != two
    broken = [state.step("1 +", reseed=seed)[1] for seed in (1, 2)]
    assert [show(after, draw) for after in broken] == [one, two]
    assert show(tool.load(after.to_bytes()), draw) == show(after, draw)
    assert tool.new(seed=6).step("import random\nn = random.random()\nn")[0] != state.step("n")[0]


def test_several_threads_may_step_one_state_at_once(tool: PythonTool) -> None:
    """Steps from one state in several threads give what they give one after the other."""
    _, base = tool.new(seed=3).step("base = 100")

    def play(number: int) -> str:
        _, state = base.step(f"mine = base + {number}")
        for _ in range(3):
            _, state = state.step("mine += 1")
        return show(state, "mine")

    count = 2 if tool.backend == "replay" else 8
    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(play, range(count))) == [str(103 + i) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "cap"), [("fork", 200, 7), ("replay", 15, 4), ("monty", 150, 7)])
def test_a_random_walk_with_many_evictions_agrees_with_full_replays(name: str, steps: int, cap: int) -> None:
    """Where a state stands, or whether it stands, never shows: each equals its cells run from the start."""
    if name not in BACKENDS:
        pytest.skip(f"no {name} here")
    rng = random.Random(1)
    cells = (
        "a = a * 3 % 1009\na",
        "import random\na += random.randrange(100)\nb = [a] * 3",
        "def f(n):\n    return n + a\nf(5)",
        "b = b + [a]\nlen(b), sum(b)",
        "a // 0",
        "print(a)\nf(a)",
        "c = {a: b}\nc",
    )
    with PythonTool(backend=name, max_live=cap, cell_timeout_s=30, **WEAK) as tool, PythonTool(
        backend=name, cell_timeout_s=30, **WEAK
    ) as other:  # fmt: skip
        _, start = tool.new(seed=9).step("a, b = 7, [1]")
        states = [start]
        rebuilt = 0
        for turn in range(steps):
            state = rng.choice(states[-12:]) if rng.random() < 0.8 else rng.choice(states)
            rebuilt += not state.is_live
            _, after = state.step(rng.choice(cells), reseed=turn if rng.random() < 0.2 else None)
            states.append(after)
            assert tool.num_live <= cap
            if len(states) > 40:
                states.pop(rng.randrange(30))
        assert rebuilt > steps // 10
        for state in rng.sample(states, 2 if name == "replay" else 10):
            full = other.load(state.to_bytes())  # compares every cell
            assert full.key == state.key
            assert show(full, "a, b, random.random()") == show(state, "a, b, random.random()")
            full.close_tree()


@pytest.mark.skipif("fork" not in BACKENDS, reason="needs /proc")
def test_heavy_states_are_evicted_by_their_memory() -> None:
    """The budget counts what each state holds alone; what states share is counted once."""
    with PythonTool(backend="fork", memory_budget_mb=150, max_live=60, **WEAK) as tool:
        start = tool.new()
        light = [start.step(f"x = {i}")[1] for i in range(20)]
        assert tool.num_live == 20 and tool.memory_mb < 150
        heavy = [start.step(f"x = b'{i % 10}' * 40_000_000")[1] for i in range(8)]
        assert heavy[-1].is_live and sum(state.is_live for state in heavy) <= 3 and tool.memory_mb <= 150
        assert [show(state, "len(x), x[:1]") for state in heavy[:2]] == ["(40000000, b'0')", "(40000000, b'1')"]
        assert show(light[3], "x") == "3"
        shared = [heavy[-1]]
        for i in range(12):
            shared.append(shared[0].step(f"y = {i}")[1])
        assert sum(state.is_live for state in shared) == 13


@needs_monty
def test_heavy_dumps_are_evicted_by_their_size() -> None:
    """A state of monty takes no more and no less than its dump."""
    with PythonTool(backend="monty", memory_budget_mb=20, **WEAK) as tool:
        start = tool.new()
        heavy = [start.step(f"x = '{i}' * 9_000_000")[1] for i in range(9)]
        assert heavy[-1].is_live and sum(state.is_live for state in heavy) <= 2
        assert show(heavy[0], "x[:2]") == "'00'"


def test_a_heavier_budget_than_there_are_states_evicts_nothing(backend: str) -> None:
    """Only what is beyond a cap is rebuilt."""
    with PythonTool(backend=backend, **WEAK) as tool:
        starts = [tool.new(seed=i) for i in range(2)]
        assert tool.num_live == 0  # a start needs no process
        states = [start.step("x = 1")[1] for start in starts]
        assert tool.num_live == 2 and all(state.is_live for state in states) and tool.memory_mb > 0
        del states
        assert eventually(lambda: tool.num_live == 0)


# -- bytes ---------------------------------------------------------------------------------------


def test_bytes_restore_the_state_on_the_same_backend(tool: PythonTool) -> None:
    """The durable form is JSON with the versions, and what comes back goes on as the first one does."""
    state = tool.new(seed=11)
    for code in ("import random\na = random.random()", "print(a)", "1 / 0", "a > 2"):
        _, state = state.step(code)
    (state,) = state.clone(1, reseed=[4])
    saved = json.loads(state.to_bytes())
    assert saved["seed"] == 11 and saved["reseed"] == 4 and saved["made_with"]["output_chars"] == "2000"
    assert set(saved["made_with"]) >= ({"monty"} if tool.backend == "monty" else {"python", "numpy", "sympy"})
    again = tool.load(state.to_bytes())
    assert again.key == state.key and again.to_bytes() == state.to_bytes()
    assert show(again, "a, random.random()") == show(state, "a, random.random()")


@pytest.mark.slow
def test_bytes_of_one_backend_restore_on_another_if_every_cell_shows_the_same(tools: dict[str, PythonTool]) -> None:
    """Fork and replay run one interpreter; monty is another, and agrees as far as it has the same Python."""
    saved, shown = {}, set()
    for name, tool in tools.items():
        state = tool.new(seed=2)
        for code in ("x = 41", "x + 1", "import random\nrandom.seed(1)\nrandom.random()"):
            _, state = state.step(code)
        saved[name] = state
        shown.add(show(state, "x, random.random()"))
    assert len(shown) == 1
    for one, other in itertools.permutations(tools, 2):
        again = tools[other].load(saved[one].to_bytes())
        assert again.key == saved[one].key
        assert show(again, "x, random.random()") in shown


@needs_monty
@pytest.mark.slow
def test_a_state_that_does_not_come_out_the_same_raises_and_names_the_versions(tools: dict[str, PythonTool]) -> None:
    """Another version is not refused, but a difference is never silent, and it is said what may have caused it."""
    for tool in tools.values():
        _, state = tool.new().step("x = 1\nx")
        saved = json.loads(state.to_bytes())
        saved["made_with"]["sympy"] = "0.1"
        assert show(tool.load(json.dumps(saved).encode()), "x") == "1"
        saved["cells"][0]["digest"] = "0" * 64
        with pytest.raises(ReplayDivergenceError, match=r"Cell 1 .*saved with sympy 0\.1; here is sympy"):
            tool.load(json.dumps(saved).encode())
    _, state = tools["replay"].new().step("import sympy\nsympy.sqrt(8)")
    with pytest.raises(ReplayDivergenceError, match=r"saved with monty .none., numpy .*; here is monty 1"):
        tools["monty"].load(state.to_bytes())
    _, state = tools["replay"].new().step("import time\ntime.time_ns()")
    with pytest.raises(ReplayDivergenceError, match="depend on time") as caught:
        tools["replay"].load(state.to_bytes())
    assert "saved with" not in str(caught.value)


@needs_monty
@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 99},
        {"seed": None},
        {"cells": 3},
        {"cells": [{"code": "x", "digest": "y", "reseed": "z"}]},
        {"reseed": [1]},
        {"made_with": []},
    ],
)
def test_bytes_that_are_no_state_are_refused(tools: dict[str, PythonTool], change: dict[str, Any]) -> None:
    """Whatever is wrong with the data is a StateError."""
    tool = tools["monty"]
    saved = json.loads(tool.new().to_bytes())
    for data in (json.dumps(saved | change).encode(), b"nonsense", b"[]", b"[" * 100_000, b"\xff"):
        with pytest.raises(StateError):
            tool.load(data)


# -- processes -----------------------------------------------------------------------------------


def test_closing_a_tree_ends_its_processes_and_no_others(tool: PythonTool) -> None:
    """All states of the session are closed, those that somebody holds too; other sessions go on."""
    before = tool.num_live
    other = tool.new(seed=1).step("y = 1")[1]
    with tool.tree(seed=2) as start:
        states = [start, *(start.step(f"x = {i}")[1] for i in range(2))]
        states.append(states[1].step("x += 1")[1])
        assert tool.num_live > before + 1
    assert tool.num_live == before + 1
    assert not any(state.is_live for state in states)
    with pytest.raises(StateError, match="tree of this state is closed"):
        states[1].step("x")
    assert show(other, "1") == "1"
    assert len(states[-1].history) == 2 and states[-1].to_bytes()


@pytest.mark.parametrize("what", ["tree", "tool"])
def test_closing_ends_the_steps_that_run(backend: str, what: str) -> None:
    """A step in another thread comes back at once, with an error that says why."""
    with PythonTool(backend=backend, cell_timeout_s=60, **WEAK) as tool:
        state = tool.new()
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(state.step, "while True: pass")
            time.sleep(0.3)
            state.close_tree() if what == "tree" else tool.close()
            with pytest.raises(StateError, match="closed"):
                step.result(timeout=20)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_closing_the_tool_leaves_no_process_no_descriptor_and_no_file(
    backend: str, tmp_path: Path, monkeypatch
) -> None:
    """No process, descriptor, thread or file; closing twice is fine, and the tool says that it is closed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    gc.collect()
    files, before, threads = open_files(), descendants(), threading.active_count()
    tool = PythonTool(backend=backend, **WEAK)
    state = tool.new()
    states = [state.step(f"x = {i}")[1] for i in range(2)]
    assert descendants() - before
    tool.close()
    tool.close()
    assert eventually(lambda: not descendants() - before)
    assert open_files() == files and threading.active_count() == threads
    assert not list(tmp_path.iterdir())
    for use in (lambda: states[0].step("x"), tool.new, lambda: tool.load(states[0].to_bytes())):
        with pytest.raises(StateError, match="closed"):
            use()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", [*BACKENDS, "unconfined"])
def test_a_killed_driver_leaves_no_process(name: str) -> None:
    """SIGKILL of the driver, with a cell running and states parked, ends everything below it."""
    program = f"""
        import threading, time
        from trace_gym.envs.math.python_tool import PythonTool, replay_backend
        name = {name!r}
        replay_backend._IS_LINUX = replay_backend._IS_LINUX and name != "unconfined"
        name = "replay" if name == "unconfined" else name
        tool = PythonTool(backend=name, cell_timeout_s=2, allow_weak_isolation=True)
        state = tool.new()
        states = [tool.new().step("y = 1")[1] for _ in range(2)]
        def go():  # from a thread that ends: the processes must outlive it
            states.append(state.step("x = 1")[1])
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        assert states[-1].step("x")[0].text == "1"
        def run():
            tool.new().step("while True: pass")
        threading.Thread(target=run, daemon=True).start()
        time.sleep(1)
        print("ready", flush=True)
        time.sleep(60)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
    below = descendants(driver.pid)
    assert below
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in below))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_driver_starts_processes_of_its_own(backend: str) -> None:
    """After os.fork the copy neither uses nor ends what belongs to the original; with monty it says that it cannot."""
    with PythonTool(backend=backend, **WEAK) as tool:
        _, state = tool.new(seed=4).step("x = 4")
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                if backend == "monty":
                    with pytest.raises(trace_gym.InfrastructureError, match="by 'spawn'"):
                        tool.new().step("1")
                    good = True
                else:
                    good = show(state, "x") == "4" and show(tool.new(), "1") == "1"
                state.close()
                tool.close()
                code = 0 if good else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert state.is_live and show(state, "x") == "4" and show(tool.new(), "1") == "1"


# -- other systems -------------------------------------------------------------------------------


@needs_monty
@pytest.mark.slow
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_tool_works_without_what_only_linux_or_posix_has(system: str) -> None:
    """It imports and runs a session of each portable backend with those modules and functions gone."""
    program = """
        import asyncio, os, signal, subprocess, sys, sysconfig, tempfile, gymnasium
        os.environ["MONTY_BIN"] = os.path.join(sysconfig.get_path("scripts"), "monty")
        for name in ("resource", "fcntl", "termios", "pwd", "grp"):
            sys.modules[name] = None
        for name in ("fork", "forkpty", "memfd_create", "register_at_fork", "pidfd_open", "pread", "geteuid", "killpg"):
            delattr(os, name)
        for name in ("setitimer", "pidfd_send_signal", "SIGXCPU"):
            delattr(signal, name)
        sys.platform = sys.argv[1]
        import trace_gym.envs.math
        from trace_gym.envs.math import PythonTool, grade
        from trace_gym.errors import BadInputError
        assert "trace_gym.envs.math.python_tool.sandbox" not in sys.modules
        for name in ("replay", "fork"):
            try:
                PythonTool(backend=name)
            except BadInputError as error:
                print(error)
        with PythonTool() as tool:
            print(tool.backend)
        for name in ("replay", "monty"):
            with PythonTool(backend=name, allow_weak_isolation=True, cell_timeout_s=1) as tool:
                _, state = tool.new(seed=1).step("x = [1]")
                left, right = (state.step(f"x.append({i})\\nx")[0].text for i in (2, 3))
                late = state.step("print('on')\\nwhile True: pass")[0]
                print(name, left, right, state.step("x")[0].text, late.status, late.text[:2])
    """
    command = [sys.executable, "-c", textwrap.dedent(program), system]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    weak, fork, *rest = run.stdout.splitlines()
    assert "allow_weak_isolation=True" in weak and "monty" in weak and "lacks Linux" in weak
    assert "needs Linux" in fork
    assert rest == ["monty", "replay [1, 2] [1, 3] [1] timeout on", "monty [1, 2] [1, 3] [1] timeout on"]


@pytest.mark.parametrize("module", ["frames", "interpreter", "prelude", "replay_session", "clock", "boot"])
def test_what_a_plain_session_consists_of_needs_no_posix(module: str) -> None:
    """The process of a replay session runs on every system, so it imports nothing that some system lacks."""
    program = f"""
        import os, signal, sys
        for name in ("resource", "fcntl", "termios", "pwd", "grp"):
            sys.modules[name] = None
        del os.fork, os.register_at_fork, os.memfd_create, signal.setitimer
        sys.platform = "win32x"
        import trace_gym.envs.math.python_tool.{module}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.slow
def test_an_unconfined_session_runs_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off Linux a thread reads the requests, and only the deadline and the pipe end the process."""
    monkeypatch.setattr(replay, "_IS_LINUX", False)
    with PythonTool(backend="replay", cell_timeout_s=1, **WEAK) as tool:
        _, state = tool.new(seed=1).step("x = 1")
        assert show(state, "x + 1") == "2" and show(state, "x + 2") == "3"
        assert state.step("import time\ntime.sleep(60)")[0].status == "timeout"
        assert show(state, "x") == "1"
    strict = replay.ReplayBackend(Limits(1.0, 1024, 1000, 4), must_isolate=True)
    with pytest.raises(trace_gym.InfrastructureError, match="did not confine"):
        strict.start(0)
    strict.close()


def machine(monkeypatch: pytest.MonkeyPatch, isolation: str, *backends: str) -> None:
    found = SimpleNamespace(isolation=isolation, backends=backends, missing=("seccomp",))
    monkeypatch.setattr(choice, "capabilities", lambda: found)


@pytest.mark.parametrize(
    ("isolation", "backends", "has_monty", "weak", "chosen"),
    [
        ("full", ("fork", "replay"), True, False, "fork"),
        ("seccomp", ("fork", "replay"), False, False, "fork"),
        ("rlimits", ("fork", "replay"), False, True, "fork"),
        ("rlimits", ("fork", "replay"), True, False, "monty"),
        ("rlimits", ("fork", "replay"), False, False, None),
        ("full", ("replay",), True, False, "replay"),
        ("none", ("replay",), True, False, "monty"),
        ("none", ("replay",), True, True, "replay"),
        ("none", ("replay",), False, False, None),
    ],
)
def test_auto_is_the_best_backend_that_isolates(
    monkeypatch: pytest.MonkeyPatch, isolation: str, backends: tuple[str, ...], has_monty: bool, weak: bool, chosen: str
) -> None:
    """Full Python where it is confined or may be unconfined, else monty, else a refusal that says what to do."""
    machine(monkeypatch, isolation, *backends)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: object() if has_monty else None)
    if chosen is None:
        with pytest.raises(BadInputError, match=r"lacks seccomp.*'monty'.*allow_weak_isolation=True"):
            choose_backend("auto", weak)
    else:
        assert choose_backend("auto", weak) == chosen


def test_a_backend_that_cannot_run_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for, what exists, what is missing; weak isolation only where it is accepted."""
    with pytest.raises(BadInputError, match="Did you mean 'replay'"):
        PythonTool(backend="reply")
    machine(monkeypatch, "none", "replay")
    for name in ("fork", "replay"):
        with pytest.raises(BadInputError):
            choose_backend(name, False)
    assert choose_backend("replay", True) == "replay"
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[monty\]"):
        choose_backend("monty", False)


# -- the environment -----------------------------------------------------------------------------


def test_the_environment_takes_the_backend_and_says_how_it_keeps_states(backend: str) -> None:
    """`metadata["snapshot"]` is exact or replay; a bad name is refused when the environment is made."""
    env = gymnasium.make("trace_gym/MathCode-v0", backend=backend, **WEAK)
    assert env.metadata["snapshot"] == ("replay" if backend == "replay" else "exact")
    _, info = env.reset(seed=0)
    assert ("no sympy" in json.dumps(info["tools"])) == (backend == "monty")
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "x = 6\\nx * 7"}}\n</tool_call>'
    assert env.step(call)[0] == "42"
    (twin,) = trace_gym.clone(env)
    assert twin.step(call.replace("x = 6", "x += 1"))[0] == "49"
    assert env.step(call.replace("x = 6", "x += 2"))[0] == "56"
    twin.close()
    env.close()
    with pytest.raises(BadInputError, match="Unknown backend"):
        gymnasium.make("trace_gym/MathCode-v0", backend="docker")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != choose_backend("auto", True)])
def test_every_law_of_a_snapshot_holds_on_every_backend(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What `trace-gym check --backend` prints; the default backend is checked with every environment's laws."""
    cycles = "5" if backend == "replay" else "30"  # there each starts a Python
    options = ["--backend", backend, "--env-kwargs", json.dumps(WEAK), "--cycles", cycles]
    code = main(["check", "trace_gym/MathCode-v0", *options])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and len(lines) >= 15
    assert all(line.startswith("holds") for line in lines), "\n".join(lines)


def test_a_result_is_a_value() -> None:
    """Results compare by what they show."""
    assert CellResult("a at 0x7f0000000000", "ok").digest == CellResult("a at 0x7f1111111111", "ok").digest
