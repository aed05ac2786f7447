"""The last resort for what this grader does not read itself: math-verify, kept on a short line.

Its parser reads much LaTeX, and silently reads less than the whole; its comparison rounds to six places and depends
on the order of its arguments (Math-Verify #14, #41, #60, #71). So it is asked only where the own grammar gives up, only
for LaTeX, for more digits, and in both directions.

Both of its timeouts are off: they use signals that cancel other alarms and do not fire inside C code. Whoever calls
this kills the process instead.
"""

from __future__ import annotations

import logging
from typing import Any

import math_verify
from math_verify import LatexExtractionConfig

from trace_gym.envs.math.grading.decide import Verdict, is_worth_asking
from trace_gym.envs.math.grading.judge import UndecidedError

_DIGITS = 30


def verify(answer: str, right: str) -> Verdict:
    """Compare two texts with math-verify.

    Raises:
        UndecidedError: If it cannot read the right answer.
    """
    if not is_worth_asking(right):
        raise UndecidedError("the right answer cannot be read")
    if not is_worth_asking(answer):
        return Verdict("wrong", "parse: the answer cannot be read")
    gold, found = _parse(right), _parse(answer)
    if not gold:
        raise UndecidedError("the right answer cannot be read, not even by math-verify")
    if not found:
        return Verdict("wrong", "parse: the answer cannot be read")
    same = all(
        math_verify.verify(one, other, float_rounding=_DIGITS, numeric_precision=_DIGITS, timeout_seconds=None)
        for one, other in ((gold, found), (found, gold))
    )
    return Verdict("correct" if same else "wrong", "compared by math-verify")


def _parse(text: str) -> list[Any]:
    bare = text.strip().strip("$").strip()
    return math_verify.parse(
        f"${bare}$", extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )


def warm_up() -> None:
    """Load what the first comparisons would load."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    verify("\\int_0^1 2 x dx", "2 \\int_0^1 x dx")
