"""What a worker does with one comparison, and the worker of systems that cannot fork: it reads lines, and answers them.

A worker first reads and evaluates the right answer and says so. If it has to be killed after that, the other answer is
to blame. It runs no code of a model; what could happen to it is that it computes for ever or eats memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import mpmath

from trace_gym.envs.math.grading import exact, symbolic
from trace_gym.envs.math.grading.decide import UnreadError, Verdict, decide, leaves_of
from trace_gym.envs.math.grading.digits import Evaluation
from trace_gym.envs.math.grading.judge import Leaf, UndecidedError, UndefinedAnswerError
from trace_gym.envs.math.grading.numeric import NumericJudge, places_for

_MAX_BITS = 1 << 17
_DIGITS = 60


def prepare() -> None:
    """Load everything, lazy parts too, and widen the caps, as this process can be killed."""
    exact.MAX_BITS = _MAX_BITS
    symbolic.warm_up()
    for answer, right in (("\\sin 2x", "2\\sin x\\cos x"), ("e^{\\pi i}", "-1"), ("\\ln 8/\\ln 2", "3"), ("5!", "x")):
        compare(answer, right, False, lambda: None)


def compare(answer: str, right: str, percent_asked: bool, on_right_read: Callable[[], None]) -> Verdict:
    """Compare two texts with everything this process has.

    Args:
        answer: What was found in the box.
        right: The right answer.
        percent_asked: Whether the question asks for a percentage.
        on_right_read: Called once the right answer was read and evaluated, if this grader reads it itself.
    """
    leaves = leaves_of(right)
    if leaves is not None:
        for leaf in leaves:
            _try_out(leaf)
        on_right_read()
    try:
        return decide(answer, right, NumericJudge(), percent_asked=percent_asked)
    except UnreadError:
        pass
    except UndecidedError as problem:
        return Verdict("ungradable", str(problem))
    try:
        return symbolic.verify(answer, right)
    except UndecidedError as problem:
        if leaves is not None:
            return Verdict("wrong", "parse: the answer cannot be read")
        return Verdict("ungradable", f"parse: {problem}")


def _try_out(leaf: Leaf) -> None:
    with mpmath.workdps(_DIGITS):
        for point in places_for(leaf.node)[:1]:
            try:
                Evaluation(point).value(leaf.node)
            except UndefinedAnswerError:
                pass


def answer_request(message: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Answer one request ``{id, answer, right, percent_asked}``, in one or two messages."""
    number = message["id"]
    try:
        verdict = compare(
            message["answer"], message["right"], message["percent_asked"], lambda: send({"id": number, "right": "read"})
        )
    except (MemoryError, RecursionError) as problem:
        send({"id": number, "beyond": type(problem).__name__})
        return
    send({"id": number, "outcome": verdict.outcome, "reason": verdict.reason})


def main(_: list[str]) -> None:
    """Serve lines of JSON on the standard streams until the input ends."""
    output, sys.stdout = sys.stdout, sys.stderr

    def send(message: dict[str, Any]) -> None:
        output.write(json.dumps(message) + "\n")
        output.flush()

    prepare()
    send({"hello": 0})
    for line in sys.stdin:
        answer_request(json.loads(line), send)
