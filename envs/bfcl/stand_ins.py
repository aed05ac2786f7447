"""What the simulators import, answered by us: nothing in them may depend on the process, or change it.

- ``random``: a generator that is kept as a seed and the distance from it. The state of a real one is 2.5 kB, the larger
  part of most simulators, and costs more to save than all the rest.
- ``datetime``: a calendar that stands still. Files have no time of modification, which no function shows; whether a
  traveller is of age is decided for the day of the wheel's release.
- ``mpmath``: a context of its own; setting the precision of the process's would change what others calculate.
"""

from __future__ import annotations

import datetime
import random
from types import SimpleNamespace
from typing import Any

from trace_gym.errors import require

_WORD = 32  # bits
MAX_WORDS = 10_000_000  # that a generator may have come from its seed; a call draws a few


class Dice:
    """Draws as ``random.Random(seed)`` does.

    Args:
        seed: The seed.
        words: How many words of the generator's stream have been drawn.
    """

    __slots__ = ("_generator", "seed", "words")

    def __init__(self, seed: int, words: int = 0) -> None:
        """Keep the place; the generator is made with the first draw."""
        self.seed = seed
        self.words = words
        self._generator: random.Random | None = None

    def __reduce__(self) -> tuple[type[Dice], tuple[int, int]]:
        """Save the place alone."""
        return Dice, (self.seed, self.words)

    def randint(self, a: int, b: int) -> int:
        """Return an integer from a to b, both included."""
        return self._ready().randint(a, b)

    def uniform(self, a: float, b: float) -> float:
        """Return a number between a and b."""
        return self._ready().uniform(a, b)

    def _ready(self) -> random.Random:
        if self._generator is None:
            self._generator = _Counted(self)
        return self._generator


class _Counted(random.Random):
    """Tells dice how many words it has drawn."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice.seed)
        if dice.words:
            super().getrandbits(_WORD * dice.words)
        self.dice = dice

    def random(self) -> float:
        self.dice.words += 2
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        self.dice.words += -(-k // _WORD)
        return super().getrandbits(k)


class _Calendar(datetime.datetime):
    """Stands still."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        """Return nothing: this is only ever asked for a file's time of modification."""
        return None

    @classmethod
    def today(cls) -> _Calendar:
        """Return the day of the wheel's release."""
        return cls(2026, 3, 23)


def stand_ins() -> dict[str, SimpleNamespace]:
    """Return what stands in for the modules that the simulators import, with as much as they use.

    Raises:
        MissingExtraError: If mpmath is not installed.
    """
    context = require("mpmath", "bfcl").MPContext()
    return {
        "random": SimpleNamespace(Random=Dice),
        "datetime": SimpleNamespace(datetime=_Calendar, time=datetime.time, timedelta=datetime.timedelta),
        "mpmath": SimpleNamespace(mp=context, log=context.log),
    }
