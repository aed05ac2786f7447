"""Prefixes as numbers: hashed words and turn statistics, for predictors without a language model.

A word's weight is found by its CRC-32, so the same text and seed give the same numbers in every
process. Numbers are known by how many digits they have. Of a long text only the head and the tail
are read. Left out: word order, and signed hashing (with thousands of weights words rarely collide).

Letters: N prefixes, W words of all of them together.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trace_gym.tree import Prefix

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_DIGITS = re.compile(r"\d+")
_SPLIT = str.maketrans(dict.fromkeys("()[]{}<>,.;:=!?\"'`_|/\\\n", " "))
_TROUBLE = frozenset("error errors exception traceback invalid failed failure timeout denied unknown missing".split())
_TURN_BUCKETS = (0, 1, 2, 3, 3, 4)  # turns 0, 1, 2, 3-4, 5 and more
NUM_DENSE = 16
_SALT = 40503  # shifts the same word to another weight for another place or turn bucket


@dataclass(frozen=True)
class Features:
    """Features of N prefixes: dense columns, and hashed words in compressed sparse rows.

    Attributes:
        dense: Turn statistics, ``[N, 16]``; theirs are the first weights.
        index: Weight of each word, row by row, ``[W]``.
        value: Value of each word, ``[W]``; the words of one text have length 1 together.
        lengths: Words of each row, ``[N]``, at least 1.
    """

    dense: FloatArray
    index: IntArray
    value: FloatArray
    lengths: IntArray

    def times(self, weights: FloatArray) -> FloatArray:
        """Return features times weights, ``[N]``."""
        starts = np.cumsum(self.lengths) - self.lengths
        words = np.add.reduceat(weights[self.index] * self.value, starts)
        result: FloatArray = self.dense @ weights[:NUM_DENSE] + words
        return result

    def transposed(self, rows: FloatArray, size: int, power: int = 1) -> FloatArray:
        """Return transposed features, each to a power, times a number per row, ``[size]``."""
        spread = np.repeat(rows, self.lengths) * self.value**power
        result = np.bincount(self.index, spread, minlength=size).astype(np.float64, copy=False)
        result[:NUM_DENSE] += rows @ self.dense**power
        return result


class _Words(dict[str, int]):
    """Hash of each word; a number counts by how many digits it has."""

    def __init__(self, seed: int) -> None:
        """Start empty; words are hashed as they are met."""
        super().__init__()
        self.seed = seed

    def __missing__(self, word: str) -> int:
        plain = _DIGITS.sub(lambda digits: f"#{len(digits[0])}", word)
        hashed = self[word] = zlib.crc32(plain.encode(), self.seed)
        return hashed


class TextHasher:
    """Turns prefixes into features; the same text and seed give the same numbers everywhere."""

    def __init__(self, size: int, seed: int) -> None:
        """Hash into `size` weights, the first of which belong to the statistics."""
        self._size = size
        self._words = _Words(seed)
        self._texts: dict[str, tuple[IntArray, float]] = {}

    def __call__(self, prefixes: Sequence[Prefix], surprise: FloatArray, evidence: FloatArray) -> Features:
        """Describe prefixes by their text, their statistics and what is known of their prompt.

        Args:
            prefixes: At least one prefix.
            surprise: Log-odds of each prefix's prompt above those of the average prompt, ``[N]``.
            evidence: Rollouts behind that number, ``[N]``.
        """
        if len(self._texts) > 10_000 or len(self._words) > 200_000:  # bounds the memory
            self._texts.clear()
            self._words.clear()
        parts: list[IntArray] = []
        salts: list[int] = []
        facts: list[tuple[float, ...]] = []
        for prefix in prefixes:
            task, said, seen = _texts_of(prefix)
            words, trouble = self._hash(task), 0.0
            parts.append(words[0])
            salts.append(1)
            if prefix.turn > 0:
                bucket = _TURN_BUCKETS[min(prefix.turn, 5)]
                observed, trouble = self._hash(seen)
                parts += (self._hash(said)[0], observed, observed)
                salts += (2, 3, 4 + bucket)
            facts.append((len(task), len(said), len(seen), trouble))
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        index = np.concatenate(parts)
        index += np.repeat(np.array(salts, np.int64) * _SALT, sizes)
        index %= self._size - NUM_DENSE
        index += NUM_DENSE
        first = np.flatnonzero(np.array(salts) == 1)  # every prefix starts with its task
        return Features(
            dense=_dense(prefixes, np.array(facts, np.float64), surprise, evidence),
            index=index,
            value=np.repeat(1.0 / np.sqrt(sizes), sizes),
            lengths=np.add.reduceat(sizes, first),
        )

    def _hash(self, text: str) -> tuple[IntArray, float]:
        """Return the hashed words of a text's head and tail, never none, and whether it complains."""
        known = self._texts.get(text)
        if known is None:
            short = text if len(text) <= 300 else text[:120] + " " + text[-180:]
            words = short.lower().translate(_SPLIT).split() or [""]
            hashed = np.fromiter(map(self._words.__getitem__, words), np.int64, len(words))
            known = self._texts[text] = hashed, float(not _TROUBLE.isdisjoint(words))
        return known


def _texts_of(prefix: Prefix) -> tuple[str, str, str]:
    """Return the task's text, the last thing the agent said and what it saw since."""
    task, said, seen = "", "", ""
    for message in prefix.messages:
        if message.role == "assistant":
            break
        if message.role == "user":
            task = f"{task}\n{message.content}" if task else message.content
    if prefix.turn > 0:
        for message in reversed(prefix.messages):
            if message.role == "assistant":
                said = message.content
                break
            seen = f"{message.content}\n{seen}" if seen else message.content
    return task, said, seen


def _dense(prefixes: Sequence[Prefix], facts: FloatArray, surprise: FloatArray, evidence: FloatArray) -> FloatArray:
    """Return the statistics of each prefix, ``[N, 16]``, of the order of 1."""
    turn = np.array([prefix.turn for prefix in prefixes])
    tokens = np.array([prefix.num_tokens for prefix in prefixes], dtype=np.float64)
    errors = np.array([prefix.num_tool_errors for prefix in prefixes], dtype=np.float64)
    deep = turn > 0
    bucket = np.array(_TURN_BUCKETS)[np.minimum(turn, 5)]
    columns = [
        np.ones(turn.size),
        deep,
        *(bucket == b for b in (1, 2, 3)),
        np.log1p(tokens) / 5.0,
        np.log1p(errors),
        (errors > 0) & deep,
        facts[:, 3],
        surprise * ~deep,
        surprise * deep,
        evidence / (evidence + 2.0),
        np.log1p(facts[:, 0]) / 5.0 - 1.0,
        deep * (np.log1p(facts[:, 1]) / 5.0),
        deep * (np.log1p(facts[:, 2]) / 5.0),
        np.log1p(turn),
    ]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
