"""Laws of the stateful Python tool, on real processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from process_tree import descendants, eventually, open_files

from trace_gym.envs.math.python_tool import CellResult, PythonTool, State, landlock, shared_tool
from trace_gym.errors import (
    BadInputError,
    InfrastructureError,
    ReplayDivergenceError,
    StateError,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tool forks: Linux only")

RULESET, _ = landlock.prepare((), Path("/nonexistent"))
if RULESET is not None:
    os.close(RULESET)
needs_landlock = pytest.mark.skipif(RULESET is None, reason="this kernel has no Landlock")

UNDONE = ("timeout", "memory", "killed")


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with PythonTool(cell_timeout_s=10, output_chars=2000) as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[PythonTool]:
    """A tool whose cells have half a second."""
    with PythonTool(cell_timeout_s=0.5, memory_mb=512) as made:
        yield made


@pytest.fixture
def start(tool: PythonTool) -> State:
    return tool.new(seed=0)


def sandbox(tool: PythonTool) -> Any:
    return tool._sessions.backend.sandbox  # type: ignore[attr-defined]


def show(state: State, code: str) -> CellResult:
    return state.step(code)[0]


# -- what a cell shows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 3", "(no output)"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
        ("print('a')\n2 + 2", "a\n4"),
        ("terms = [4, 5]\nprint(\n    sum(terms)\n)", "9"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out')", "out\nerr\nout"),
        ("print('ä ≤ 数')", "ä ≤ 数"),
        ("print('\\ud800')", "\\ud800"),
        ("import sys\nn = sys.stdout.buffer.write(b'ok \\xff done')", "ok \ufffd done"),
        ("```python\nprint(6 * 9)\n```", "54"),
        ("  ```\n1 + 1\n```  \n", "2"),
        ("```py\nticks = '```'\nlen(ticks)\n```", "3"),
        ("    u = 5\n    print(u + 1)", "6"),
        ("'one\\ntwo'.count('\\n')", "1"),
        ("'''\n    kept\n'''", "'\\n    kept\\n'"),
        ("object()", "<object object at 0x…>"),
        ("hex(255 ** 9)", repr(hex(255**9))),
        ("f'{0x7fffffff:#x}'", "'0x7fffffff'"),
        ("import sys\nsys.stdout.close()\nprint('still')", "still"),
        ("import builtins\nbuiltins.len = None", "(no output)"),
    ],
)
def test_a_cell_shows_what_a_notebook_shows(start: State, code: str, text: str) -> None:
    """Prints and the value of a last expression, once, in order, without the model's wrapping."""
    result = show(start, code)
    assert (result.text, result.status) == (text, "ok")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("a = 1\nprint(b)", "line 2: print(b)\nNameError: name 'b' is not defined"),
        ("1 / 0", "line 1: 1 / 0\nZeroDivisionError: division by zero"),
        ("def f(x):\n    return 1 / x\nf(0)", None),
        ("x = (", "line 1: x = (\nSyntaxError: '(' was never closed"),
        ("raise KeyboardInterrupt", "line 1: raise KeyboardInterrupt\nKeyboardInterrupt"),
        ("print(str(7**9000))", None),
        ("\0", None),
    ],
)
def test_an_error_is_shown_in_the_lines_of_the_cell(start: State, code: str, text: str | None) -> None:
    """The lines that led to the error and its message; nothing of the tool's own frames."""
    result = show(start, code)
    assert result.status == "error"
    assert "zygote" not in result.text and "Traceback" not in result.text
    if text is not None:
        assert result.text == text


def test_an_error_inside_a_function_of_an_earlier_cell_names_that_cell(start: State) -> None:
    """Frames of other cells are told apart, frames of libraries are left out."""
    _, after = start.step("def inverse(x):\n    return 1 / x")
    assert show(after, "inverse(0)").text == (
        "line 1: inverse(0)\ncell 1, line 2, in inverse: return 1 / x\nZeroDivisionError: division by zero"
    )
    long = show(start, "import json\ndef f(n):\n    return json.loads('{') if n == 0 else f(n - 1)\nf(50)")
    assert len(long.text.splitlines()) <= 5
    assert "decoder.py" not in long.text and "raw_decode" not in long.text


def test_exit_input_and_a_wrecked_namespace_do_not_end_the_session(start: State) -> None:
    """Output is kept, a read fails at once, and the next cell has its built-ins back."""
    result = show(start, "print('step one')\nif True:\n    exit()\nprint('never')")
    assert result.text.startswith("step one\nexit() was called") and "never" not in result.text
    assert result.status == "ok"
    assert show(start, "import sys\nsys.exit('bad')").status == "error"
    result = show(start, "n = int(input('n = '))")
    assert "EOFError" in result.text and result.status == "error"
    _, after = start.step("__builtins__ = {}\nimport builtins\nbuiltins.print = builtins.len = None")
    assert show(after, "print(len([1, 2]))").text == "2"


def test_long_output_keeps_both_ends_and_says_how_much_is_missing(start: State) -> None:
    """The result printed last survives the cut, and the model is told of the cut."""
    result = show(start, "for i in range(20000):\n    print('line', i)\nprint('FINAL=42')")
    assert result.status == "truncated"
    assert result.text.startswith("line 0\nline 1\n") and result.text.endswith("FINAL=42")
    assert "bytes omitted" in result.text and len(result.text) < 2200
    for code in ("print('x' * 500_000)", "'é' * 500_000", "print('π' * 3000, end='')"):
        result = show(start, code)
        assert result.status == "truncated" and len(result.text) < 2200
        assert "\ufffd" not in result.text


def test_two_hundred_megabytes_of_output_are_no_problem(start: State) -> None:
    """Only the ends are ever kept, so a flood costs time and nothing else."""
    result = show(start, "for _ in range(20):\n    print('y' * 10_000_000)")
    assert result.status == "truncated" and "about 199" in result.text


def test_numbers_may_have_more_digits_than_can_be_shown(start: State) -> None:
    """A huge integer is an error message about the limit, not a crash."""
    result = show(start, "print(2 ** 20000)")
    assert result.status == "error" and "4300" in result.text


# -- states
# ------------------------------------------------------------------------------------------


def test_a_state_is_unchanged_by_the_steps_from_it(start: State) -> None:
    """Stepping a state never shows in the state, its clones or its siblings."""
    _, base = start.step("values = [1]")
    before = base.key
    left, right = base.clone(2)
    _, after = left.step("values.append(2)")
    assert show(after, "values").text == "[1, 2]"
    assert show(right, "values").text == show(base, "values").text == "[1]"
    assert base.key == before != after.key
    assert [cell.code for cell in after.history] == ["values = [1]", "values.append(2)"]


def test_a_child_lives_on_when_its_parent_is_closed_first(tool: PythonTool) -> None:
    """A state needs no process of its ancestors."""
    first = tool.new(seed=1)
    _, second = first.step("x = 20")
    (clone,) = second.clone()
    first.close()
    second.close()
    second.close()
    assert show(clone, "x + 1").text == "21"
    with pytest.raises(StateError, match="closed"):
        second.step("x")


def test_equal_states_draw_equal_random_numbers_and_reseeded_ones_do_not(start: State) -> None:
    """A step is a function of the prefix and the cell; a seed for the step makes it another."""
    draw = (
        "import random\nimport numpy as np\nprint(random.random(), np.random.rand(), np.random.default_rng().random())"
    )
    _, after = start.step("import random\nrandom.random()")
    shown = {show(state, draw).text for state in (*after.clone(2), after)}
    assert len(shown) == 1
    varied = [show(state, draw).text for state in after.clone(3, reseed=[1, 2, 1])]
    assert varied[0] == varied[2] != varied[1]
    assert after.step(draw, reseed=1)[0].text == varied[0]
    assert start.clone(1, reseed=[5])[0].key != start.key
    with pytest.raises(BadInputError, match="one seed per clone"):
        start.clone(2, reseed=[1])


def test_a_function_sees_the_globals_of_its_own_branch(start: State) -> None:
    """State means everything in memory: closures, generators, classes, open iterators."""
    _, after = start.step(
        "k = 1\ndef f():\n    return k\ngen = (i * i for i in range(9))\nnext(gen)\n"
        "class P:\n    pass\np = P()\np.v = 7"
    )
    _, after = after.step("k = 5\nnext(gen)")
    assert show(after, "f(), next(gen), p.v, P.__module__").text == "(5, 4, 7, '__main__')"


def test_eight_threads_may_step_one_state_at_once(tool: PythonTool) -> None:
    """Steps from one state in several threads give what they give one after the other."""
    _, base = tool.new(seed=3).step("base = 100")

    def play(number: int) -> str:
        _, state = base.step(f"mine = base + {number}")
        for _ in range(5):
            _, state = state.step("mine += 1")
        return show(state, "mine").text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(8))) == [str(105 + i) for i in range(8)]


@pytest.mark.slow
def test_bytes_restore_the_state_in_a_fresh_process(tool: PythonTool) -> None:
    """The durable form is JSON, and the state that comes back continues as the first one does."""
    state = tool.new(seed=11)
    for code in ("import random\na = random.random()", "print(a)", "1 / 0", "s = {'b', 'a'}\ns"):
        _, state = state.step(code)
    data = state.to_bytes()
    assert json.loads(data)["seed"] == 11
    program = """
        import sys
        from trace_gym.envs.math.python_tool import PythonTool
        with PythonTool() as tool:
            state = tool.load(sys.stdin.buffer.read())
            print(state.key, state.step("(a, s, random.random())")[0].text)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        input=data,
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode().strip() == f"{state.key} " + show(state, "(a, s, random.random())").text


def test_a_replay_that_shows_something_else_raises(tool: PythonTool) -> None:
    """A state that cannot be restored is an error, never a silently different state."""
    _, state = tool.new().step("import time\ntime.time_ns()")
    with pytest.raises(ReplayDivergenceError, match="Cell 1"):
        tool.load(state.to_bytes())
    saved = json.loads(state.to_bytes())
    for broken in (b"nonsense", b"[]", json.dumps(saved | {"version": 99}).encode()):
        with pytest.raises(StateError):
            tool.load(broken)


def test_a_state_beyond_the_cap_is_rebuilt_and_equal() -> None:
    """Eviction is invisible: only the missing cells run again, in the nearest live ancestor."""
    with PythonTool(max_live=3) as small:
        states = [small.new(seed=5)]
        for i in range(8):
            _, after = states[-1].step(f"import random\nx{i} = random.random(), {i}\nx{i}")
            states.append(after)
        assert sum(state.is_live for state in states) == 3
        assert not states[2].is_live
        assert show(states[2], "x1[1]").text == "1"
        _, again = states[2].step("import random\nx2 = random.random(), 2\nx2")
        assert again.key == states[3].key
        assert "x3" in show(states[3], "x3").text
        assert show(states[8], "x7, random.random()").text == show(states[8], "x7, random.random()").text


# -- hostile cells
# -----------------------------------------------------------------------------------

FORK = "import ctypes\npid = ctypes.CDLL(None).fork()\n"
DEATHS = {
    "exit": "import os\nprint('before')\nos._exit(3)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "cpu_limit": ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass"),
    "close_everything": "import os\nos.closerange(0, 256)",
    "garbage": "import os\nos.write(3, b'garbage that is no frame')",
    "huge_frame": "import os\nos.write(3, b'\\xff\\xff\\xff\\x7f' + b'x' * 100)",
    "forged_reply": (
        "import os, json, struct\nb = json.dumps({'id': '1-00', 'status': 'ok'}).encode()\n"
        "os.write(3, struct.pack('<I', len(b)) + b)"
    ),
    "nested_json": ("import os, struct\nb = b'[' * 100000\nos.write(3, struct.pack('<I', len(b)) + b)"),
}
HANGS = {
    "loop": "for k in range(5):\n    print('n =', k)\nwhile True:\n    pass",
    "stubborn": ("while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass"),
    "regex": "import re\nprint('n = 4')\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "sleep": "print('n = 4')\nimport time\ntime.sleep(60)",
    "power": "print('n = 4')\nprint(len(str(10 ** (10 ** 9))))",
    "signals": (
        "import signal\nfor s in set(range(1, 32)) - {9, 19}:\n"
        "    signal.signal(s, signal.SIG_IGN)\nprint('n = 4')\nwhile True: pass"
    ),
}
REFUSED = {
    "fork": "import os\nos.fork()",
    "forkpty": "import os\nos.forkpty()",
    "spawn": "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "import subprocess\nsubprocess.run(['true'])",
    "system": "import os\nos.system('true')",
    "exec": "import os\nos.execv('/bin/true', ['true'])",
    "thread": "import threading\nthreading.Thread(target=print).start()",
    "plot": "import matplotlib.pyplot as plt\nplt.show()",
    "write_file": "open('canary.txt', 'w').write('x')",
    "mkdir": "import pathlib\npathlib.Path('logs').mkdir(parents=True)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 22))",
    "signal": "import os\nos.kill(1, 9)",
}
UNREADABLE = {
    "password_file": "open('/etc/passwd').read()",
    "own_memory": "open('/proc/self/mem', 'rb')",
    "parent_environment": "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_cell_that_kills_or_corrupts_its_process_is_undone(start: State, name: str) -> None:
    """The observation says in one line what happened; the state before the cell stays usable."""
    _, base = start.step("x = 3")
    result, after = base.step(DEATHS[name])
    assert result.status == "killed", result
    assert after is base
    assert result.text.splitlines()[-1].startswith("The cell was killed: ")
    assert show(after, "x").text == "3"
    if name == "exit":
        assert result.text.startswith("before\n") and "exit code 3" in result.text


@pytest.mark.parametrize("name", HANGS)
def test_no_cell_outlives_its_deadline(hasty: PythonTool, name: str) -> None:
    """A cell ends at its deadline whatever it does, and what it printed before is kept."""
    base = hasty.new()
    began = time.monotonic()
    result, after = base.step(HANGS[name])
    assert time.monotonic() - began < 15  # half a second of its own, and ten times as much of the clock on the wall
    assert result.status in ("timeout", "memory") and after is base
    if name not in ("stubborn", "power"):
        assert "n = 4" in result.text
    assert show(after, "1 + 1").text == "2"


@pytest.mark.parametrize("name", REFUSED)
def test_processes_threads_and_files_are_refused_with_an_error(start: State, name: str) -> None:
    """What a session may not do is an ordinary exception, so the model can read why."""
    result, after = start.step(REFUSED[name])
    assert result.status == "error", result
    assert show(after, "1 + 1").text == "2"


@needs_landlock
@pytest.mark.parametrize("name", UNREADABLE)
def test_files_outside_the_python_installation_cannot_be_read(start: State, name: str) -> None:
    """Neither the machine's files nor the memory and environment of processes are open to a cell."""
    assert "PermissionError" in show(start, UNREADABLE[name]).text


@pytest.mark.parametrize("code", ["'a' * 10**12", "x = []\nwhile True:\n    x.append(bytearray(10**8))"])
def test_a_cell_that_wants_too_much_memory_is_undone(code: str) -> None:
    """An uncaught MemoryError rolls the session back, as half a cell cannot be repeated."""
    with PythonTool(cell_timeout_s=30, memory_mb=512) as tool:
        base = tool.new()
        result, after = base.step(code)
        assert result.status == "memory" and "512 MB" in result.text and after is base
        assert show(after, "1").text == "1"


@needs_landlock
def test_a_session_cannot_read_the_package_it_is_run_by(start: State) -> None:
    """The tasks and their answers lie in the package; libraries beside it stay importable."""
    source = Path(__file__).resolve().parents[2] / "envs" / "math" / "tasks" / "task_sets.py"
    assert "PermissionError" in show(start, f"open({str(source)!r}).read()").text
    assert "Error" in show(start, "import trace_gym.envs.math.tasks").text
    assert show(start, "import wave, sympy.stats\nsympy.stats.E(sympy.stats.Die('d'))").text == "7/2"


@pytest.mark.parametrize(
    "code",
    [
        FORK + "pid > 0",
        "import ctypes\nlibc = ctypes.CDLL(None)\nt = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(t), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)",
        "import ctypes\nctypes.CDLL(None).prctl(1, 9)",
        FORK + "if pid == 0:\n    while True: pass",
        FORK + "if pid == 0:\n    import os\n    os.write(3, b'x' * 100)",
        "import os\nfor _ in range(3):\n    pass\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.killpg(0, 9)",
    ],
)
def test_forks_and_signals_past_the_python_level_do_no_harm(tool: PythonTool, start: State, code: str) -> None:
    """A raw fork never makes two servers of one session; signals stay in the session."""
    _, base = start.step("x = 3")
    process = base._node.process
    if process is None or not process.is_isolated:
        pytest.skip("nothing on this machine keeps signals inside a session")
    other = tool.new(seed=9)
    pids = sandbox(tool).pids
    base.step(code)
    for _ in range(3):
        assert show(base, "x").text == "3"
    assert show(other, "1").text == "1"
    assert sandbox(tool).pids == pids
    assert sandbox(tool).is_alive


# -- processes
# ---------------------------------------------------------------------------------------


def test_closing_the_tool_leaves_no_process_and_no_descriptor() -> None:
    """`close` ends everything, twice is fine, and the tool says that it is closed."""
    gc.collect()
    files, before = open_files(), descendants()
    tool = PythonTool()
    state = tool.new()
    states = [state.step(f"x = {i}")[1] for i in range(10)]
    assert len(descendants() - before) == 12  # and zygote, supervisor
    tool.close()
    tool.close()
    assert not descendants() - before
    assert open_files() == files
    with pytest.raises(StateError, match="closed"):
        states[0].step("x")
    with pytest.raises(StateError, match="closed"):
        tool.new()


def test_closing_the_tool_ends_the_steps_that_run() -> None:
    """A step in another thread comes back at once, with an error that says why."""
    tool = PythonTool(cell_timeout_s=60)
    state = tool.new()
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(state.step, "while True: pass") for _ in range(2)]
        time.sleep(0.2)
        tool.close()
        for step in steps:
            with pytest.raises(StateError, match="closed"):
                step.result(timeout=10)


def test_a_process_that_is_ended_before_its_cell_starts_says_so(tool: PythonTool, start: State) -> None:
    """Whoever closes a tree may be faster than a step that waits for its turn to run."""
    _, state = start.step("x = 1")
    process = state._node.process
    assert process is not None
    process.kill()
    ending = process.run("x", 2, tool.limits, 5.0)
    assert (ending.status, ending.text) == ("killed", "")


def test_a_fork_hook_of_a_cell_does_not_touch_later_states(start: State) -> None:
    """Code that a cell registers for forks would run outside of every deadline."""
    hook = "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(60))"
    _, after = start.step(hook)
    began = time.monotonic()
    assert show(after, "1").text == "1"
    assert time.monotonic() - began < 10


def test_a_session_that_a_cell_damaged_for_good_says_so(start: State) -> None:
    """No cell raises in the driver, not even by breaking what runs the cells after it."""
    wreck = "import sys\nframe = sys._getframe()\nwhile 'self' not in frame.f_locals or not hasattr(\n"
    wreck += "    frame.f_locals['self'], '_poll'):\n    frame = frame.f_back\n"
    wreck += "frame.f_locals['self']._poll = None"
    result, after = start.step(wreck)
    assert result.status == "ok"
    result, again = after.step("1 + 1")
    assert result.status == "killed" and "damaged" in result.text and again is after
    assert show(start, "1 + 1").text == "2"


def test_a_state_that_nobody_holds_has_no_process() -> None:
    """The process of a state goes with its last handle, by close or by collection."""
    with PythonTool() as tool:
        first = tool.new().step("x = 1")[1]
        idle = descendants()
        kept = first.step("y = 1")[1]
        for _ in range(20):
            kept = kept.step("y += 1")[1]
        del first
        assert eventually(lambda: len(descendants()) == len(idle))
        assert tool.num_live == 1
        assert show(kept, "y").text == "21"


@pytest.mark.slow
def test_hundreds_of_random_and_hostile_cells_leave_nothing() -> None:
    """Whatever runs in whatever order, live states answer right and nothing stays behind."""
    rng = random.Random(0)
    gc.collect()
    files, before = open_files(), descendants()
    hostile = [*DEATHS.values(), *REFUSED.values(), HANGS["loop"], FORK, FORK + "pid > 0"]
    with PythonTool(cell_timeout_s=0.3, max_live=8) as tool:
        pool: list[tuple[State, int]] = [(tool.new(), 0)]
        pool = [(pool[0][0].step("t = 0")[1], 0)]
        for _ in range(200):
            state, total = rng.choice(pool)
            if rng.random() < 0.3:
                code = rng.choice([code for code in hostile if code is not HANGS["loop"]])
                if rng.random() < 0.03:
                    code = HANGS["loop"]
                result, after = state.step(code)
                assert (after is state) == (result.status in UNDONE)
            else:
                result, after = state.step(f"t += {(add := rng.randrange(100))}\nt")
                total += add
                assert (result.text, result.status) == (str(total), "ok")
                pool.append((after, total))
            if len(pool) > 20:
                pool.pop(rng.randrange(20))
    assert eventually(lambda: not descendants() - before)
    assert open_files() == files


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["supervisor", "zygote"])
def test_a_dead_sandbox_is_an_infrastructure_failure_once(victim: int) -> None:
    """The first use after the death raises; the next rebuilds the states from their history."""
    with PythonTool() as tool:
        _, state = tool.new(seed=2).step("import random\nx = random.random()\nx")
        pids = sandbox(tool).pids
        os.kill(pids[victim], signal.SIGKILL)
        assert eventually(lambda: not state.is_live)
        with pytest.raises(InfrastructureError) as caught:
            state.step("x")
        assert caught.value.kind == "sandbox_died"
        assert show(state, "round(x * 0)").text == "0"
        assert sandbox(tool).pids != pids


def test_leases_with_equal_limits_share_one_tool_until_the_last_is_closed() -> None:
    """Many environments of one process cost one zygote."""
    first, second = shared_tool(cell_timeout_s=3), shared_tool(cell_timeout_s=3)
    other = shared_tool(cell_timeout_s=4)
    assert first.tool is second.tool is not other.tool
    state = first.new()
    first.close()
    first.close()
    assert second.owns(state) and not other.owns(state)
    assert show(state, "1").text == "1"
    second.close()
    assert not second.owns(state)
    other.close()
    assert shared_tool(cell_timeout_s=3).tool is not first.tool


@pytest.mark.slow
def test_a_forked_driver_starts_processes_of_its_own() -> None:
    """After os.fork the copy neither uses nor ends what belongs to the original."""
    with PythonTool() as tool:
        _, state = tool.new(seed=4).step("x = 4")
        pids = sandbox(tool).pids
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                good = show(state, "x").text == "4" and sandbox(tool).pids != pids
                state.close()
                tool.close()
                code = 0 if good else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sandbox(tool).pids == pids
        assert state.is_live and show(state, "x").text == "4"


def test_limits_out_of_range_are_refused_by_name() -> None:
    """A bad limit is named together with what is allowed."""
    with pytest.raises(BadInputError, match="memory_mb must be at least 256"):
        PythonTool(memory_mb=1)
    with PythonTool() as tool, pytest.raises(BadInputError, match="code must be a str"):
        tool.new().step(b"x")  # type: ignore[arg-type]
