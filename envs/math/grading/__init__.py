r"""Grading of mathematical answers: `grade(prediction, gold)` says ``correct``, ``wrong`` or ``ungradable``, and why.

How it goes: the answer is taken out of the text (`extract`), both sides are brought to one notation (`notation`) and
read as shapes (`reading`): lists, intervals, relations, quantities, matrices, words, expressions. Shapes are compared
(`compare`), and the expressions in them by exact arithmetic (`judge`). What that cannot decide goes to a worker process
with a second of CPU time (`pool`): arithmetic of 420 digits (`numeric`), and math-verify for LaTeX that this grader
does not read (`symbolic`). No text is ever evaluated as code, and none takes longer than two seconds.

Which text is the answer
    The last ``\boxed{}`` (or ``\fbox{}``) after the last ``</think>``; if it is not closed there is no answer, and no
    earlier box takes its place. Without a box: what follows the last ``answer:``, ``the answer is``, ``####`` or, on a
    line of its own, ``A:``; else the whole text.

What is equal
    * Numbers exactly. A decimal of 12 digits or more is a printed double and may be off by 1e-12 of the value; a
      shorter one is exact. So 0.333 is not 1/3.
    * A right answer may be rounded: a decimal of four digits or more (``0.6667``) stands for what rounds to it if the
      answer is exact or a double, one of three digits (``33.3``) for a fraction; in a vector the digits are counted
      together. ``12.5`` does not stand for 12.49.
    * Expressions as functions. The names of variables matter; ``x + 1`` is not ``t + 1``. Roots of positive numbers
      are meant where it matters, so ``sqrt(1/n)`` is ``1/sqrt(n)``, but ``sqrt(x^2)`` is not ``x``. In a factorial, an
      exponent or a floor, n, k and the like are whole numbers (x, y, z, t, u, v, w are not). ``log`` without a base is
      the natural or the decimal logarithm. ``e`` and ``i`` are constants; sympy's ``I``, ``E``, ``oo`` are known.
    * A name may be left out: ``x = 5`` is ``5``, ``f(x) = x^2`` is ``x^2``. Two different names are two different
      answers (but ``y`` may stand for ``f(x)``).
    * Equations up to a factor, inequalities up to a positive one. In one unknown only the solved form is an answer:
      ``2x = 10`` is not ``x = 5``, as the question may have said the former. Likewise a sum, an integral or a limit is
      not an answer where the right one is worked out.
    * Inequalities and intervals alike: ``0 < x < 1`` is ``(0, 1)``.
    * Tuples in order, sets and bare lists in any order. A bare list is a tuple too, as it does not say; ``{1, 2}`` is
      not ``(1, 2)``, and ``[1, 2]`` is none of both. A Python list given as an answer is a bare list. ``a \pm b`` is
      a list of two. A list of one is its element. All must be there, and nothing else.
    * A unit may be left out by one side, not contradicted: ``10 m`` is ``10`` and ``1000 cm``, not ``10 kg``. So with
      degrees, dollars, and nouns (``18 eggs``). Scale words count: ``10 million`` is not ``10``.
    * ``50%`` is ``0.5``. Only where the question asks for a percentage is it ``50`` instead (argument `question`).
    * Digits in a base may leave the base out (``52_8`` is ``52``); they are not converted.
    * Ratios up to a factor, and as fractions: ``4:2`` is ``2:1`` is ``2``. ``5:30`` is a time of day.
    * ``1,234`` is a number or a list, whichever fits; ``1, 234`` is a list.
    * Words without case and article. ``no solution`` is ``\emptyset``, ``all real numbers`` is ``(-\infty, \infty)``.
    * Choices by letter (``(B)``, ``B.``, ``B: both``), with `options` also by an option's own text.
    * Several right answers, of which one is enough, are joined by a capital ``OR`` in the right answer.

Equality is symmetric but for roundings, ``OR``, and the Python list.

Wrong or ungradable
    The right answer decides. If it can be read, every answer is correct or wrong: empty, unreadable, undefined, too
    long (512 characters, or twice the right answer), too deep (40 brackets), too large (ten million digits) and too
    slow (a second) are wrong, with a reason that starts with ``guard``, ``parse`` or ``timeout`` where that helps. No
    text is a way out of being graded. ``ungradable`` is left for what is not the answer's fault: a right answer that
    cannot be read or evaluated, a sentence compared with another sentence, a machine too busy to use the second in
    two, workers that are still starting (a `GraderLease` starts them ahead), or the extra ``math`` not installed. It
    must not be counted as wrong. If the workers themselves fail, `grade` raises `InfrastructureError`.
"""

from trace_gym.envs.math.grading.decide import Verdict
from trace_gym.envs.math.grading.extract import extract_answer
from trace_gym.envs.math.grading.grader import grade
from trace_gym.envs.math.grading.pool import GraderLease, close_grader

__all__ = ["GraderLease", "Verdict", "close_grader", "extract_answer", "grade"]
