"""What the Python tool of MathCode costs: branching, confinement, memory, and whole episodes against other tools.

Run by hand, on Linux: ``python tests/benchmarks/code_tool.py [--quick]``. What is compared is interleaved in one run,
and ratios are of medians; the last line is one JSON object with them. The comparison with Jupyter needs ``pip install
ipykernel``, which no extra of the project brings; without it that part says "not installed" and its ratios are null.
The stateless tool is as cheap as that of any peer: a bare ``python -c`` that runs the cells before again and imports
what the cells import, which is sympy in one kind of episodes and next to nothing in the bundled ones.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

from trace_gym.envs.math.env import MathCodeEnv
from trace_gym.envs.math.python_tool import CellResult, sandbox
from trace_gym.envs.math.python_tool.backend import Limits
from trace_gym.envs.math.python_tool.fork_backend import ForkBackend
from trace_gym.envs.math.tasks.families_plan import Step
from trace_gym.envs.math.tasks.task import Task, TaskTable

CELLS = (
    "from sympy import *\nx, y = symbols('x y')\np = expand((x + 2 * y - 1) ** 8)",
    "roots = solve(x ** 4 - 5 * x ** 2 + 6, x)\nroots",
    "area = integrate(x ** 2 * exp(-x) * sin(x), (x, 0, oo))\narea",
    "def digits(n):\n    return sum(int(d) for d in str(n))\ndigits(2 ** 500)",
    "found = [n for n in range(1, 30000) if n % digits(n) == 0]\nlen(found)",
    "q = factor(p.subs(y, 3) - p.subs(y, 1))\nq",
)
PROBE = "len(found) + len(roots)"
SOLUTION = (
    "from sympy import expand, solve, symbols\nx = symbols('x')\nroots = solve(x**2 - 7*x + 12, x)\nroots",
    "p = expand((x - roots[0])**3 * (x - roots[1]))\np",
    "p.subs(x, 10)",
)
WORK = "total = 0\nfor i in range(200_000):\n    total += i * i % 7\ntotal"
SYMBOLIC = "from sympy import *\nx = symbols('x')\nfactor(expand((x + {n}) ** 5 - 1))"
MARK = "-- the last cell --"
UNCONFINED = """
Domain.listen = lambda self: None
Domain.enter = lambda self, parent=None: False
"""
QUIET: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
LIMITS = Limits(cell_timeout_s=60, memory_mb=2048, output_chars=4000, max_live=1000)
Times = dict[str, list[float]]
Way = tuple[Callable[[], object], int, int]


def interleave(ways: dict[str, Way], rounds: int, seconds: float) -> Times:
    """Run every way in turn, until `rounds` rounds or the seconds are over, at least two; milliseconds.

    A way is what to run, how often in a row, and in how many of the rounds.
    """
    times: Times = {name: [] for name in ways}
    end = time.monotonic() + seconds
    for turn in range(rounds):
        if turn >= 2 and time.monotonic() > end:
            break
        for name, (run, burst, most) in ways.items():
            if turn < most:
                began = time.perf_counter()
                for _ in range(burst):
                    run()
                times[name].append(1000 * (time.perf_counter() - began) / burst)
    return times


def table(title: str, times: Times, base: str) -> dict[str, float]:
    """Print minimum, median and their ratios to the base; return the ratios of the medians."""
    least, middle = min(times[base]), statistics.median(times[base])
    print(f"\n{title + ', ms':50} {'min':>9} {'median':>9} {'x min':>8} {'x median':>8}")
    for name, values in times.items():
        low, median = min(values), statistics.median(values)
        print(f"{name:50} {low:9.2f} {median:9.2f} {low / least:8.2f} {median / middle:8.2f}")
    return {name: statistics.median(values) / middle for name, values in times.items()}


def check(ending: Any) -> str:
    """Return the text of a cell that must run."""
    if ending.status != "ok":
        raise RuntimeError(f"The benchmark's cell failed: {ending.text}")
    return str(ending.text).strip()


def branching(rounds: int, process_rounds: int, seconds: float) -> dict[str, float]:
    """A state after six cells: another process in that state, against running the cells again."""
    script = "\n".join((*CELLS, f"print({PROBE})"))

    def replay() -> Any:
        session = made.start(0)
        for number, cell in enumerate(CELLS, 1):
            check(session.run(cell, number, LIMITS, 60.0))
        return session

    def probe(process: Any) -> None:
        if check(process.run(PROBE, len(CELLS) + 1, LIMITS, 60.0)) != expected:
            raise RuntimeError("The states are not equal.")
        process.kill()

    with backend(True) as made:
        session = replay()
        expected = subprocess.run([sys.executable, "-c", script], **QUIET).stdout.strip()
        probe(made.fork(session))
        probe(replay())
        ways: dict[str, Way] = {
            "clone": (lambda: made.fork(session).kill(), 3, rounds),
            "clone, and one cell more": (lambda: probe(made.fork(session)), 3, rounds),
            "replay in a warm session": (lambda: replay().kill(), 1, rounds),
            "replay in a new process": (
                lambda: subprocess.run([sys.executable, "-c", script], **QUIET),
                1,
                process_rounds,
            ),
        }
        times = interleave(ways, rounds, seconds)
    ratios = table("a state of six sympy cells", times, "clone")
    more = ratios["clone, and one cell more"]
    return {
        "replay_over_clone": ratios["replay in a warm session"],
        "process_over_clone": ratios["replay in a new process"],
        "replay_over_clone_and_cell": ratios["replay in a warm session"] / more,
        "process_over_clone_and_cell": ratios["replay in a new process"] / more,
    }


@contextmanager
def backend(confined: bool) -> Iterator[ForkBackend]:
    """Start processes, without any confinement if asked, from a copy of their code that has none."""
    made = ForkBackend(LIMITS)
    home = sandbox.__file__
    with tempfile.TemporaryDirectory() as folder:
        if not confined:
            copy = Path(shutil.copytree(Path(home).parent, Path(folder) / "python_tool"))
            with (copy / "confine.py").open("a") as file:
                file.write(UNCONFINED)
            sandbox.__file__ = str(copy / "sandbox.py")
        try:
            made.start(0).kill()
            sandbox.__file__ = home
            yield made
        finally:
            sandbox.__file__ = home
            made.close()


def hardening(rounds: int, seconds: float) -> dict[str, float]:
    """The same operations with and without rlimits, Landlock and seccomp; and a trivial cell of a session that runs."""
    trivial: dict[str, Way] = {}
    ways: dict[str, Way] = {}
    with backend(True) as confined, backend(False) as bare:
        for name, made in (("confined", confined), ("bare", bare)):
            session = made.start(0)
            numbers = iter(range(1, 10**6))

            def run(code: str, session: Any = session, numbers: Iterator[int] = numbers) -> None:
                check(session.run(code, next(numbers), LIMITS, 60.0))

            def branch(made: ForkBackend = made, session: Any = session) -> None:
                child = made.fork(session)
                check(child.run("1 + 1", 2, LIMITS, 60.0))
                child.kill()

            run(SYMBOLIC.format(n=0))
            trivial[f"{name}: trivial cell"] = (lambda run=run: run("1 + 1"), 20, rounds)
            ways[f"{name}: new session"] = (lambda made=made: made.start(1).kill(), 1, rounds)
            ways[f"{name}: branch and trivial cell"] = (branch, 1, rounds)
            ways[f"{name}: loop in Python"] = (lambda run=run: run(WORK), 1, rounds)
            ways[f"{name}: sympy"] = (lambda run=run: run(SYMBOLIC.format(n=1)), 1, rounds)
        times = interleave(trivial, rounds, seconds / 2) | interleave(ways, rounds, seconds)
    table("hardening", times, "bare: trivial cell")
    print("\nconfined over bare")
    ratios = {}
    for name in (name.partition(": ")[2] for name in times if name.startswith("bare")):
        ratios[name] = statistics.median(times[f"confined: {name}"]) / statistics.median(times[f"bare: {name}"])
        print(f"{name:50} {ratios[name]:37.2f}")
    return {
        "confined_over_bare_new": ratios["new session"],
        "confined_over_bare_branch": ratios["branch and trivial cell"],
        "confined_over_bare_cell": ratios["loop in Python"],
        "trivial_cell_ms": statistics.median(times["confined: trivial cell"]),
    }


def memory(count: int) -> dict[str, float]:
    """Real memory that one state more takes, after it ran a sympy cell; all are branched off one state."""
    with backend(True) as made:
        base = made.start(0)
        base.run("from sympy import *\nx = symbols('x')", 1, LIMITS, 60.0)
        states: list[Any] = [base, base.zygote]
        totals = []
        for n in range(2 * (count // 2)):
            if n == count // 2:
                totals.append(sum(map(real_bytes, states)))
            states.append(made.fork(base))
            states[-1].run(SYMBOLIC.format(n=n + 1), 2, LIMITS, 60.0)
        totals.append(sum(map(real_bytes, states)))
    each = (totals[1] - totals[0]) / (count // 2)
    thousand = totals[1] + (1000 - count) * each
    print(f"\n{count} live states, each after a sympy cell: {totals[1] / 1e9:.2f} GB, {each / 1e6:.2f} MB a state more")
    print(f"1,000 of them: {thousand / 1e9:.1f} GB{'' if count >= 1000 else ' (extrapolated)'}")
    return {"state_mb": each / 1e6, "thousand_states_gb": thousand / 1e9}


def real_bytes(process: Any) -> int:
    """Return the share of a process in the memory: pages, their tables, its stack and some 70 kB of the kernel's."""
    folder = Path(f"/proc/{process.pid}")
    sizes = [line.split() for name in ("smaps_rollup", "status") for line in (folder / name).read_text().splitlines()]
    kibibytes = sum(int(fields[1]) for fields in sizes if fields and fields[0] in ("Pss:", "VmPTE:"))
    return 1024 * (kibibytes + 16 + 70)


# -- whole episodes ----------------------------------------------------------------------------------------------------


class Stateless:
    """The tool of many peers: each call is a new ``python -c``, so it repeats the cells before.

    Has what an environment needs of a tool and of a state.
    """

    def __init__(self, cells: tuple[str, ...] = ()) -> None:
        """Come after the cells."""
        self._cells = cells

    def new(self, seed: int = 0) -> Stateless:
        """Return the start."""
        return Stateless()

    def step(self, code: str, reseed: int | None = None) -> tuple[CellResult, Stateless]:
        """Run the cells, and show what the last one prints and the value of its last expression."""
        tree = ast.parse(code)
        value = "None"
        if isinstance(tree.body[-1], ast.Expr):
            value = ast.unparse(tree.body.pop())
        parts = [*self._cells, f"print({MARK!r})", ast.unparse(tree), f"_ = {value}", "if _ is not None: print(_)"]
        run = subprocess.run([sys.executable, "-c", "\n".join(parts)], **QUIET)
        return CellResult(run.stdout.rpartition(MARK)[2].strip(), "ok"), Stateless((*self._cells, code))

    def close(self) -> None:
        """Nothing is left to close."""


class Jupyter:
    """A kernel for every episode, as a session must start with nothing in it."""

    def __init__(self) -> None:
        """Start none yet."""
        self._kernel: Any = None

    def new(self, seed: int = 0) -> Jupyter:
        """Start a kernel in the place of the last."""
        from jupyter_client.manager import start_new_kernel

        self.close()
        self._kernel, self._client = start_new_kernel(stderr=subprocess.DEVNULL)
        return self

    def step(self, code: str, reseed: int | None = None) -> tuple[CellResult, Jupyter]:
        """Run a cell in it."""
        shown: list[str] = []
        self._client.execute(code)
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=60)
            except Empty as error:
                raise RuntimeError("The kernel does not answer.") from error
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif kind == "stream":
                shown.append(content["text"])
            elif kind == "error":
                raise RuntimeError(f"The benchmark's cell failed: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle" and message["parent_header"]:
                if message["parent_header"]["msg_type"] == "execute_request":
                    return CellResult("".join(shown).strip(), "ok"), self

    def close(self) -> None:
        """End the kernel."""
        if self._kernel is not None:
            self._client.stop_channels()
            self._kernel.shutdown_kernel(now=True)
            self._kernel = None


class SympyTasks(TaskTable):
    """One task whose solution takes three cells of sympy, as models write them."""

    def __init__(self) -> None:
        """List it."""
        super().__init__(["sympy-1"])

    def get(self, task_id: str) -> Task:
        """Return it."""
        question = "Let p = (x - a)^3 (x - b), where a < b are the roots of x^2 - 7x + 12. Find p(10)."
        return Task(task_id, question, "2058", "sympy", 1, tuple(Step(code, (code,)) for code in SOLUTION))


def play(env: MathCodeEnv, seed: int) -> None:
    """Play one episode with the scripted agent's actions."""
    _, info = env.reset(seed=seed)
    ended, reward = False, 0.0
    while not ended:
        _, reward, terminated, truncated, info = env.step(info["demonstration"])
        ended = terminated or truncated
    if reward != 1.0:
        raise RuntimeError(f"The benchmark's episode failed: {info}")


def episodes(rounds: int, slow_rounds: int, seconds: float) -> dict[str, float | None]:
    """Complete episodes, one after the other, with each tool; the bundled tasks hardly import anything."""
    tools: dict[str, Any] = {"trace_gym": None, "python -c": Stateless()}
    if importlib.util.find_spec("ipykernel") and importlib.util.find_spec("jupyter_client"):
        tools["Jupyter"] = Jupyter()
    else:
        print("\nJupyter: not installed (pip install ipykernel)")
    ratios: dict[str, float | None] = {}
    for kind in ("sympy", "bundled"):
        ways: dict[str, Way] = {}
        envs = []
        for name, tool in tools.items():
            env = MathCodeEnv(demonstrator_skill=1.0)
            if kind == "sympy":
                env.tasks = SympyTasks()
            if tool is not None:
                env._tool = tool
            seeds = iter(range(10**6))
            play(env, next(seeds))
            is_slow = tool is not None
            run = lambda env=env, seeds=seeds: play(env, next(seeds))  # noqa: E731
            ways[name] = (run, 1, slow_rounds) if is_slow else (run, 3, rounds)
            envs.append(env)
        times = interleave(ways, rounds, seconds)
        table(f"one {kind} episode", times, "trace_gym")
        base = statistics.median(times["trace_gym"])
        print("episodes a second: " + ", ".join(f"{n} {1000 / statistics.median(t):.1f}" for n, t in times.items()))
        for name in ("python -c", "Jupyter"):
            key = f"{kind}_episodes_over_{'jupyter' if name == 'Jupyter' else 'python'}"
            ratios[key] = statistics.median(times[name]) / base if name in times else None
        for env in envs:
            env.close()
    return ratios


def main() -> None:
    """Print the tables and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and states, under 50 seconds")
    quick = parser.parse_args().quick
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    ratios: dict[str, float | None] = {}
    if quick:
        ratios |= branching(rounds=6, process_rounds=3, seconds=6)
        ratios |= hardening(rounds=40, seconds=4)
        ratios |= memory(count=40)
        ratios |= episodes(rounds=6, slow_rounds=3, seconds=4)
    else:
        ratios |= branching(rounds=40, process_rounds=15, seconds=120)
        ratios |= hardening(rounds=300, seconds=60)
        ratios |= memory(count=1000)
        ratios |= episodes(rounds=60, slow_rounds=15, seconds=120)
    print(json.dumps({name: value if value is None else round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
