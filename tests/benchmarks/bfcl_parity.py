"""Compares our executor and checker with the pinned wheel's, on trajectories that follow or miss the ground truth.

    python tests/benchmarks/bfcl_parity.py            # 800 ground truths and 6,400 perturbed trajectories, minutes
    python tests/benchmarks/bfcl_parity.py --every 20 # one scenario in twenty

Upstream runs in a process of its own, since it evaluates text and leaks: default arguments and constants that one
trajectory changes are seen by the next, and by its own ground truth. It is asked twice, as it is and with the leaks
stopped up. Ours must agree with the latter always, and with the former wherever nothing leaked; the report names what
did. Texts of calls are compared byte for byte.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Turns = list[list[list[str]]]  # turns of steps of calls
# Upstream finds this valid, wrongly: the mention goes to a default list that the ground truth's tweet has in common.
LEAK = ("multi_turn_base_77", 2, "mention(tweet_id=10, mentioned_usernames=['@leak'])")
PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval"


# Upstream's side: imports nothing of trace_gym.


class Upstream:
    """The official checker, with its leaks open or stopped up."""

    def __init__(self, folder: str, stopped: bool) -> None:
        import importlib

        sys.path.insert(0, folder)
        self.checker = importlib.import_module(f"{PACKAGE}.multi_turn_checker")
        self.utils = importlib.import_module(f"{PACKAGE}.multi_turn_utils")
        self.twitter = importlib.import_module(f"{PACKAGE}.func_source_code.posting_api").TwitterAPI
        self.travel = importlib.import_module(f"{PACKAGE}.func_source_code.travel_booking")
        self.pristine = self.leaky()
        if stopped:
            self.stop()

    def leaky(self) -> str:
        """Return what a trajectory could have changed for good, as text."""
        constants = {name: vars(self.travel)[name] for name in ("CREDIT_CARD_EXTENSION", "BOOKING_RECORD_EXTENSION")}
        return json.dumps({"post_tweet": self.twitter.post_tweet.__defaults__, **constants})

    def mend(self) -> list[str]:
        """Undo what a trajectory changed for good, in place; return what that was."""
        now, pristine = json.loads(self.leaky()), json.loads(self.pristine)
        for default in self.twitter.post_tweet.__defaults__:
            default.clear()
        for name in ("CREDIT_CARD_EXTENSION", "BOOKING_RECORD_EXTENSION"):
            vars(self.travel)[name].clear()
            vars(self.travel)[name].update(pristine[name])
        return [name for name in pristine if now[name] != pristine[name]]

    def stop(self) -> None:
        """Give every call fresh defaults and every instance constants of its own."""
        import copy

        post, load = self.twitter.post_tweet, self.travel.TravelAPI._load_scenario

        def post_tweet(self, content, tags=None, mentions=None):  # type: ignore[no-untyped-def]
            return post(self, content, [] if tags is None else tags, [] if mentions is None else mentions)

        def load_scenario(self, scenario, long_context=False):  # type: ignore[no-untyped-def]
            load(self, scenario, long_context)
            self.credit_card_list = copy.deepcopy(self.credit_card_list)
            self.booking_record = copy.deepcopy(self.booking_record)

        post_tweet.__defaults__ = (None, None)
        self.leaky = lambda: self.pristine  # type: ignore[method-assign]
        self.mend = list  # type: ignore[method-assign,assignment]
        self.twitter.post_tweet, self.travel.TravelAPI._load_scenario = post_tweet, load_scenario

    def judge(self, number: int, entry: dict[str, Any], answer: list[list[str]], turns: Turns) -> dict[str, Any]:
        """Return the verdict and the texts of a trajectory."""
        texts = []
        for steps in turns:
            for step in steps:
                results, _ = self.utils.execute_multi_turn_func_call(
                    step,
                    entry["initial_config"],
                    entry["involved_classes"],
                    f"texts{number}",
                    entry["id"],
                    long_context="long_context" in entry["id"],
                )
                texts += results
        leaks = self.mend()
        try:
            verdict = self.checker.multi_turn_checker(turns, answer, entry, "", f"model{number}")
            failure = None if verdict["valid"] else verdict["error_type"]
        except RecursionError:
            failure = "RecursionError"
        for name in [name for name in vars(self.utils) if name.endswith("_instance")]:
            del vars(self.utils)[name]
        return {"failure": failure, "texts": texts, "leaks": sorted({*leaks, *self.mend()})}


def upstream(folder: str, stopped: bool) -> None:
    """Answer trajectories on stdin, a line each."""
    judge = Upstream(folder, stopped)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        print(json.dumps(judge.judge(number, job["entry"], job["answer"], job["turns"])))


# Our side.


def perturbed(task: Any, rng: np.random.Generator, pool: list[str]) -> Iterator[tuple[str, Turns]]:
    """Yield the ground truth and eight ways to miss it, or not: some of them are harmless."""
    turns = [list(calls) for calls in task.ground_truth]
    checked = [number for number, calls in enumerate(turns) if calls]

    def edit(change: Any) -> Turns:
        copy = [list(calls) for calls in turns]
        place = int(rng.choice(checked))
        change(copy, place, int(rng.integers(len(copy[place]))))
        return in_steps(copy, rng)

    def number(copy: list[list[str]], _: int, __: int) -> None:
        for calls in copy:
            calls[:] = [rewrite_numbers(call) for call in calls]

    def swap(copy: list[list[str]], place: int, _: int) -> None:
        other = int(rng.integers(len(copy)))
        copy[place], copy[other] = copy[other], copy[place]

    yield "ground truth", in_steps(turns, rng)
    yield "dropped", edit(lambda copy, place, call: copy[place].pop(call))
    yield "repeated", edit(lambda copy, place, call: copy[place].insert(call, copy[place][call]))
    yield "foreign", edit(lambda copy, place, call: copy[place].insert(call, str(rng.choice(pool))))
    yield "unknown", edit(lambda copy, place, call: copy[place].insert(call, "frobnicate(x=1)"))
    yield "reversed", edit(lambda copy, place, call: copy[place].reverse())
    yield "empty turn", edit(lambda copy, place, call: copy[place].clear())
    yield "numbers", edit(number)
    yield "swapped turns", edit(swap)


def in_steps(turns: list[list[str]], rng: np.random.Generator) -> Turns:
    """Return turns whose calls are made together, or one after another."""
    return [[calls] if rng.random() < 0.5 and calls else [[call] for call in calls] for calls in turns]


def rewrite_numbers(call: str) -> str:
    """Return a call with its integers as floats, and its whole floats as integers."""

    class Rewrite(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            if type(node.value) is int:
                return ast.Constant(float(node.value))
            if type(node.value) is float and node.value.is_integer():
                return ast.Constant(int(node.value))
            return node

    return ast.unparse(Rewrite().visit(ast.parse(call, mode="eval")))


def ours(task: Any, turns: Turns) -> tuple[str | None, list[str]]:
    """Return the first failure and the texts, by our executor and checker."""
    from trace_gym.envs.bfcl.checker import check_turn
    from trace_gym.envs.bfcl.executor import Instances

    instances, texts, failure = Instances.fresh(task), [], None
    for number, steps in enumerate(turns):
        texts += [instances.call_text(call) for step in steps for call in step]
        failure = failure or check_turn(instances, task, number, texts, any(steps))
    return failure, texts


def entries(folder: Path) -> dict[str, Any]:
    """Return upstream's entries by id."""
    files = sorted((folder / "bfcl_eval" / "data").glob("BFCL_v4_multi_turn_*.json"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {record["id"]: record for record in records}


def main() -> int:
    """Compare, print a report as JSON, and return 1 if a difference has no flag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="one scenario in so many (default: all)")
    parser.add_argument("--upstream", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--stopped", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.upstream:
        upstream(arguments.upstream, arguments.stopped)
        return 0

    from trace_gym.envs.bfcl.backend import load_backend
    from trace_gym.envs.bfcl.tasks import load_tasks

    start = time.perf_counter()
    folder = load_backend().folder
    tasks = [task for task in load_tasks().tasks() if task.base_id % arguments.every == 0]
    pool = sorted({call for task in tasks for calls in task.ground_truth for call in calls})
    cases = [
        (task, kind, turns)
        for number, task in enumerate(tasks)
        for kind, turns in perturbed(task, np.random.default_rng([0, number]), pool)
    ]
    task = load_tasks().get(LEAK[0])
    cases.append(
        (
            task,
            "leak",
            [[[*calls, LEAK[2]] if turn == LEAK[1] else [*calls]] for turn, calls in enumerate(task.ground_truth)],
        )
    )
    known = entries(folder)
    jobs = "\n".join(
        json.dumps({"entry": known[task.id], "answer": task.ground_truth, "turns": turns}) for task, _, turns in cases
    )
    command = [sys.executable, __file__, "--upstream", str(folder)]
    open_, stopped = (
        [
            json.loads(line)
            for line in subprocess.run(
                command + flags, input=jobs, capture_output=True, text=True, check=True
            ).stdout.splitlines()
        ]
        for flags in ([], ["--stopped"])
    )
    report = compare(cases, open_, stopped)
    report["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(report, indent=1))
    return int(bool(report["unexplained"]))


def compare(cases: list[Any], open_: list[Any], stopped: list[Any]) -> dict[str, Any]:
    """Return counts, and every difference."""
    passed: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    flagged, unexplained = [], []
    for (task, kind, turns), leaky, tight in zip(cases, open_, stopped, strict=True):
        failure, texts = ours(task, turns)
        name = {"ground truth": "ground truths", "leak": "leaks"}.get(kind, "perturbed trajectories")
        counts[name] += 1
        counts[f"calls of {name}"] += len(texts)
        passed[kind] += failure is None
        named = {"task": task.id, "kind": kind, "ours": failure, "upstream": leaky["failure"], "leaks": leaky["leaks"]}
        if (failure, texts) != (tight["failure"], tight["texts"]):
            other = [(a, b) for a, b in zip(texts, tight["texts"], strict=True) if a != b]
            unexplained.append({**named, "stopped": tight["failure"], "texts": other[:3]})
        elif failure != leaky["failure"] or texts != leaky["texts"]:
            (flagged if leaky["leaks"] else unexplained).append(named)
    return {**counts, "passed": passed, "flagged": flagged, "unexplained": unexplained}


if __name__ == "__main__":
    sys.exit(main())
