"""How each kind of fact is put into words: slots of sentences, each with several wordings.

A passage takes one wording of every slot, in order: one of those that say most among those whose fields are all known.
A slot none of whose facts is known is left out. Sentences about peers, other things of the kind, are added to short
passages; they are also what makes a search hit more passages than the right one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wording:
    """The wordings of one kind.

    Attributes:
        slots: Alternatives of each sentence, format strings over the columns.
        group: Columns in which peers agree; none for peers of the whole kind.
        peers: Sentences about one ``{peer}`` or up to two ``{peers}``; other fields are those of the thing itself.
        more: Sentences for passages that are short still, in order. ``{where}`` is what the thing's place is a part of,
            ``{mate}`` something else of the same year; ``{coevals}`` are people of about the same age.
    """

    slots: tuple[tuple[str, ...], ...]
    group: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
