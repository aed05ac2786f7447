"""The families of bundled tasks: one table from name to function.

A family is a function of a generator and a difficulty (1 to 5). Difficulty dials the size of the numbers and
the number of dependent cells: one at 1, two or three at 4 and 5 where the mathematics offers them. Adding a
family is a function in one of the ``families_*`` files and a line here; tasks of the other families keep
their ids and texts.
"""

from __future__ import annotations

from trace_gym.envs.math.tasks.families_algebra import bases, linear, recurrence
from trace_gym.envs.math.tasks.families_cases import congruences, digit_sum, divisors
from trace_gym.envs.math.tasks.families_number import arithmetic, chain, fractions, gcd_lcm, power
from trace_gym.envs.math.tasks.families_pairs import pairs
from trace_gym.envs.math.tasks.families_plan import Draft, Family, Step
from trace_gym.envs.math.tasks.families_search import counting, largest_prime, primes

__all__ = ["FAMILIES", "Draft", "Family", "Step"]

FAMILIES: dict[str, Family] = {
    "arithmetic": arithmetic,
    "bases": bases,
    "chain": chain,
    "congruences": congruences,
    "counting": counting,
    "digit_sum": digit_sum,
    "divisors": divisors,
    "fractions": fractions,
    "gcd_lcm": gcd_lcm,
    "largest_prime": largest_prime,
    "linear": linear,
    "pairs": pairs,
    "power": power,
    "primes": primes,
    "recurrence": recurrence,
}
