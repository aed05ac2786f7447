"""What a family of tasks hands over: a question, its exact answer and the demonstrator's cells.

Cells follow one style, so that a very small model can learn it: assign to a name, then show the name on a
line of its own (``x = 14 * 3`` and ``x``). Numbers stand in a cell in the order of the question wherever the
mathematics allows it. Cells of one plan share the names of a stateful tool: later ones use what earlier ones
defined.

A *slip* is a plausible wrong version of one cell. A silent slip runs and leads to a wrong final answer; a
family therefore hands in each slip together with the final answer it leads to, and slips that would not
matter are dropped here. A broken slip raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

Value = int | Fraction
_T = TypeVar("_T")


@dataclass(frozen=True)
class Step:
    """One cell of the demonstrator's plan.

    Attributes:
        code: The Python cell; its last line shows the value.
        slips: Plausible wrong versions of the cell; silent ones first, then the ones that raise.
    """

    code: str
    slips: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """A task before it has a name.

    Attributes:
        question: One short question.
        answer: The exact answer as the last cell shows it.
        steps: The plan, at least one cell.
    """

    question: str
    answer: str
    steps: tuple[Step, ...]


Family = Callable[[np.random.Generator, int], Draft]
"""A family: draws one `Draft` of the given difficulty (1 to 5) from the generator."""


def pick(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw an integer from ``low`` to ``high``, both included."""
    return int(rng.integers(low, high + 1))


def choose(rng: np.random.Generator, options: Sequence[_T]) -> _T:
    """Draw one of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


def worded(rng: np.random.Generator, usual: str, other: str) -> str:
    """Draw the usual wording three times in four, the other one otherwise."""
    return usual if rng.random() < 0.75 else other


def cell(name: str, expression: str, *before: str) -> str:
    """Write a cell that assigns the expression to the name and shows it.

    Args:
        name: The variable.
        expression: What is assigned.
        before: Lines that come first, such as an import.
    """
    return "\n".join([*before, f"{name} = {expression}", name])


def step(answer: Value, code: str, slips: Iterable[tuple[str, Value]], broken: str | None = None) -> Step:
    """Build a step, keeping only the slips that matter.

    Args:
        answer: The right final answer of the task.
        code: The right cell.
        slips: Wrong cells, each with the final answer it leads to when the other cells are right.
        broken: A wrong cell that raises.
    """
    kept = [text for text, final in slips if final != answer and text != code]
    if broken is not None:
        kept.append(broken)
    return Step(code, tuple(dict.fromkeys(kept)))
