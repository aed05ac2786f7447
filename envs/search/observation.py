"""What an agent sees of a search: passages within a budget of characters, or of tokens of its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from trace_gym.envs.hub import hub_or_disk, one_line
from trace_gym.envs.search.retrieval import Hit
from trace_gym.errors import BadInputError, require


class Measure(Protocol):
    """How long a text is, and how it is cut."""

    def length(self, text: str) -> int:
        """Return the length of a text."""

    def cut(self, text: str, most: int) -> str:
        """Return the beginning of a text that has a length of ``most``."""


class Characters:
    """Counts characters."""

    def length(self, text: str) -> int:
        """Return the number of characters."""
        return len(text)

    def cut(self, text: str, most: int) -> str:
        """Return the first characters."""
        return text[:most]


class Tokens:
    """Counts tokens.

    Args:
        tokenizer: A fast tokenizer of `transformers`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep what does the work; no state of it changes."""
        self._tokenizer = tokenizer.backend_tokenizer

    def length(self, text: str) -> int:
        """Return the number of tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def cut(self, text: str, most: int) -> str:
        """Return the text of the first tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]


@lru_cache(maxsize=4)  # the environments of a run share one
def load_tokens(name: str) -> Tokens:
    """Return the measure of a tokenizer, by its name at the hub or its folder.

    Raises:
        BadInputError: If it cannot be loaded, or does not say where its tokens stand in a text.
        MissingExtraError: If `transformers` is not installed.
    """
    transformers = require("transformers", "train")
    away = ""
    try:
        with hub_or_disk("train", name) as away:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever the hub, the disk or the file raises
        reason = f"the hub cannot be reached ({away})" if away else one_line(error)[:300]
        raise BadInputError(
            f"The tokenizer {name!r} cannot be loaded: {reason}. Give the folder of a model or its name at the hub, or "
            "count in characters (observation_chars)."
        ) from error
    if not tokenizer.is_fast:
        raise BadInputError(f"The tokenizer {name!r} does not say where its tokens stand in a text; give a fast one.")
    return Tokens(tokenizer)


def format_hits(hits: Sequence[Hit], budget: int, measure: Measure | None = None) -> str:
    """Return passages as Search-R1's clients print them, ``Doc n(Title: …) …`` a line, cut to a budget.

    What a short passage does not need of its share goes to those after it.

    Args:
        hits: The passages, best first.
        budget: Length of all of them together.
        measure: How length is counted; in characters by default.
    """
    measure = measure or Characters()
    lines = []
    for number, hit in enumerate(hits):
        line = f"Doc {number + 1}(Title: {hit.title}) {' '.join(hit.text.split())}"
        share = max(1, budget // (len(hits) - number))
        if measure.length(line) > share:
            kept = measure.cut(line, share)
            line = f"{kept.rpartition(' ')[0] or kept}…"
        budget -= measure.length(line)
        lines.append(line)
    return "\n".join(lines)
