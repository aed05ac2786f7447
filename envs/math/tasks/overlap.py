r"""Which questions of a test set stand in the training data.

*Exact*: the same question after normalisation (`trace_gym.envs.math.tasks.noise`). *Near*: at least a share of the
question's runs of five words, numbers or signs stand in one training question; 0.6 by default. The share counts the
test question's runs only, so that a training question that adds to it is found as well. At that share two kinds of
pairs are found: the same problem in other words or other markup, and another problem from the same template (two
numbers changed). Whether the answers are equal tells most of them apart, so they are counted apart; exact ones and
those with the same answer are called leaks.

An index of the test questions' runs is kept and the training questions stream past it, so the cost in memory is that
of the test sets. The overlap is counted exactly; no sketch (MinHash) is needed at this size. Source of the idea: the
n-gram overlap of Brown et al., arXiv 2005.14165, appendix C, with shorter runs, as problems are short.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trace_gym.envs.math.tasks.noise import identity, same_answer, stated_answer, words
from trace_gym.envs.math.tasks.task import Task
from trace_gym.errors import BadInputError

RUN = 5  # words, numbers and signs
THRESHOLD = 0.6


@dataclass(frozen=True)
class Overlap:
    """A test question and the training question most like it.

    Attributes:
        test: The test task.
        train: The training task.
        share: Share of the test question's runs that stand in the training question, in [0, 1]; 1.0 if exact.
        exact: Whether they are the same question.
        same_answer: Whether their answers are equal.
    """

    test: Task
    train: Task
    share: float
    exact: bool
    same_answer: bool

    @property
    def is_leak(self) -> bool:
        """Whether the training data are likely to give the answer away."""
        return self.exact or self.same_answer

    @property
    def kind(self) -> str:
        """The kind of overlap, in words."""
        if self.exact:
            return "exact" if self.same_answer else "exact, other answer"
        return f"near {self.share:.2f}, {'same' if self.same_answer else 'other'} answer"


def find_overlaps(train: Iterable[Task], test: Iterable[Task], threshold: float = THRESHOLD) -> list[Overlap]:
    """Find the test questions that stand in the training data, each with its best match.

    Args:
        train: The training tasks; read once.
        test: The test tasks.
        threshold: Least share of runs in common, in (0, 1].

    Returns:
        The overlaps in the order of the test tasks.

    Raises:
        BadInputError: If the threshold is out of range.
    """
    if not 0 < threshold <= 1:
        raise BadInputError(f"threshold must be above 0 and at most 1; got {threshold}.")
    tests = list(test)
    runs = [_runs(task) for task in tests]
    places: dict[int, list[int]] = {}
    for place, those in enumerate(runs):
        for run in those:
            places.setdefault(run, []).append(place)
    same: dict[bytes, list[int]] = {}
    for place, task in enumerate(tests):
        same.setdefault(identity(task), []).append(place)

    best: dict[int, Overlap] = {}
    for task in train:
        shares = dict.fromkeys(same.get(identity(task), ()), math.inf)
        common = Counter(place for run in _runs(task) for place in places.get(run, ()))
        for place, count in common.items():
            if count >= threshold * len(runs[place]):
                shares.setdefault(place, count / len(runs[place]))
        for place, share in shares.items():
            equal = same_answer(stated_answer(task), stated_answer(tests[place]))
            found = Overlap(tests[place], task, min(share, 1.0), share == math.inf, equal)
            if place not in best or _rank(found) > _rank(best[place]):
                best[place] = found
    return [best[place] for place in sorted(best)]


def _rank(overlap: Overlap) -> tuple[bool, bool, float]:
    """Order of what a reader wants to see: leaks, exact ones first."""
    return overlap.exact, overlap.same_answer, overlap.share


def _runs(task: Task) -> set[int]:
    said = words(task.question)
    return {hash(tuple(said[start : start + RUN])) for start in range(len(said) - RUN + 1)}


def overlap_table(tests: Iterable[str], overlaps: Sequence[Overlap], shown: int) -> str:
    """Return the counts by test set, and the first overlaps of each, leaks before others.

    Args:
        tests: Ids of the tasks that were tested.
        overlaps: What `find_overlaps` found among them.
        shown: Most overlaps to show of each set.
    """
    sizes = Counter(task_id.rpartition("-")[0] for task_id in tests)
    lines = [f"{'TEST SET':24}{'TASKS':>8}{'EXACT':>8}{'NEAR, SAME ANSWER':>19}{'NEAR, OTHER ANSWER':>20}"]
    details = []
    for name, size in sizes.items():
        found = [overlap for overlap in overlaps if overlap.test.family == name]
        exact = sum(overlap.exact for overlap in found)
        leaks = sum(overlap.is_leak for overlap in found)
        lines.append(f"{name:24}{size:>8}{exact:>8}{leaks - exact:>19}{len(found) - leaks:>20}")
        found.sort(key=_rank, reverse=True)
        for overlap in found[:shown]:
            text = " ".join(overlap.test.question.split())
            details.append(f"{overlap.test.task_id} = {overlap.train.task_id} ({overlap.kind}): {text[:100]}")
    return "\n".join([*lines, "", *details] if details else lines)
