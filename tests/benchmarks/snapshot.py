"""What branching costs: a live clone of a Python state against running its cells again; states of searches.

Run by hand: ``python tests/benchmarks/snapshot.py [--quick]``. All ways are interleaved in one run;
the last line is one JSON object with the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gymnasium

import trace_gym
from trace_gym.envs.math.python_tool import PythonTool, State

CELLS = (
    "from sympy import *\nx, y = symbols('x y')\np = expand((x + 2 * y - 1) ** 8)",
    "roots = solve(x ** 4 - 5 * x ** 2 + 6, x)\nroots",
    "area = integrate(x ** 2 * exp(-x) * sin(x), (x, 0, oo))\narea",
    "def digits(n):\n    return sum(int(d) for d in str(n))\ndigits(2 ** 500)",
    "found = [n for n in range(1, 30000) if n % digits(n) == 0]\nlen(found)",
    "q = factor(p.subs(y, 3) - p.subs(y, 1))\nq",
)
PROBE = "probe = len(found) + len(roots)\nprobe"


def build(state: State) -> State:
    """Run the six cells of a typical solution."""
    for cell in CELLS:
        result, state = state.step(cell)
        if result.status != "ok":
            raise RuntimeError(f"The benchmark's cell failed: {result.text}")
    return state


def measure(tool: PythonTool, rounds: int, process_rounds: int) -> dict[str, list[float]]:
    """Time every way `rounds` times, interleaved; milliseconds."""
    start = tool.new(seed=0)
    first = start.step("x = 1")[1]
    state = build(start)
    expected = state.step(PROBE)[0].text
    data = state.to_bytes()
    script = "\n".join((*CELLS, "print(len(found) + len(roots))"))

    def branch() -> str:
        (clone,) = state.clone()
        return clone.step(PROBE)[0].text

    def replay() -> str:
        return tool.load(data).step(PROBE)[0].text

    def stateless() -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def eight() -> str:
        results = {clone.step(PROBE)[0].text for clone in state.clone(8)}
        return results.pop() if len(results) == 1 else "different"

    ways: dict[str, tuple[Callable[[], str], str, int]] = {
        "new session + trivial cell": (lambda: tool.new(seed=1).step("1 + 1")[0].text, "2", rounds),
        "branch + trivial cell": (lambda: first.step("1 + 1")[0].text, "2", rounds),
        "clone of 6 cells + 1 cell": (branch, expected, rounds),
        "8 clones + 1 cell each": (eight, expected, rounds),
        "replay of 6 cells + 1 cell, warm zygote": (replay, expected, rounds),
        "all in a new python process": (stateless, expected, process_rounds),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, (way, wanted, limit) in ways.items():
            if turn >= limit:
                continue
            began = time.perf_counter()
            shown = way()
            times[name].append(1000 * (time.perf_counter() - began))
            if shown != wanted:
                raise RuntimeError(f"{name} gave {shown!r} instead of {wanted!r}.")
    return times


def search_states(searches: int, rounds: int = 2_000) -> tuple[float, float]:
    """Return the median microseconds to save and to load an episode of HotpotQASearch after so many searches."""
    # As in training: Gymnasium's checker would be saved as well, with all that the last reset returned.
    options = {"backend": "embedded", "max_turns": searches + 1, "disable_env_checker": True}
    env = gymnasium.make("trace_gym/HotpotQASearch-v0", **options)
    env.reset(seed=0)
    for number in range(searches):
        env.step(trace_gym.render_tool_call(trace_gym.ToolCall("search", {"query": f"river number {number}"})))
    state = trace_gym.save_state(env)
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        began = time.perf_counter()
        trace_gym.save_state(env)
        between = time.perf_counter()
        trace_gym.load_state(env, state)
        times.append((began, between, time.perf_counter()))
    env.close()
    saved = statistics.median(between - began for began, between, _ in times)
    loaded = statistics.median(ended - between for _, between, ended in times)
    return 1e6 * saved, 1e6 * loaded


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 seconds")
    quick = parser.parse_args().quick
    with PythonTool(cell_timeout_s=60) as tool:
        times = measure(tool, rounds=12 if quick else 60, process_rounds=4 if quick else 15)
    base_name = "clone of 6 cells + 1 cell"
    base = times[base_name]
    print(f"{'milliseconds':42} {'min':>9} {'median':>9} {'x clone (median)':>17}")
    for name, values in times.items():
        ratio = statistics.median(values) / statistics.median(base)
        print(f"{name:42} {min(values):9.2f} {statistics.median(values):9.2f} {ratio:17.1f}")
    replay = times["replay of 6 cells + 1 cell, warm zygote"]
    process = times["all in a new python process"]
    ratios = {
        "replay_over_clone": statistics.median(replay) / statistics.median(base),
        "replay_over_clone_min": min(replay) / min(base),
        "new_process_over_clone": statistics.median(process) / statistics.median(base),
        "clone_ms": statistics.median(base),
        "step_ms": statistics.median(times["branch + trivial cell"]),
    }
    print(f"\n{'microseconds, HotpotQASearch':42} {'save':>9} {'load':>9}")
    for searches in (0, 4, 16):
        saved, loaded = search_states(searches)
        print(f"{f'{searches} searches':42} {saved:9.1f} {loaded:9.1f}")
        ratios[f"search_{searches}_save_and_load_us"] = saved + loaded
    print(json.dumps({name: round(value, 2) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
