"""Writes the bundled corpus and questions from the tables of facts: ``python -m trace_gym.envs.search.tasks.generate``.

Equal tables and wordings give equal files, on any machine; a test compares the files that are shipped with fresh ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trace_gym.envs.search.tasks.drafts import Drafter, balanced
from trace_gym.envs.search.tasks.facts import read_facts
from trace_gym.envs.search.tasks.passages import PassageWriter

CORPUS, QUESTIONS = "search_corpus.jsonl", "search_questions.jsonl"
NUM_COMPARISONS, NUM_CHAINS = 1_000, 2_000


def generate() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of the corpus and of the questions."""
    facts = read_facts()
    writer = PassageWriter(facts)
    passages = {title: writer.write(fact) for title, fact in facts.items()}
    drafter = Drafter(facts, passages)
    comparisons = balanced(drafter.comparisons(), NUM_COMPARISONS)
    chains = balanced(drafter.chains(), NUM_CHAINS)
    levels = [comparisons, *([draft for draft in chains if draft.difficulty == level] for level in (2, 3))]
    questions = []
    # Round the difficulties, so that every beginning of the file is balanced.
    for index in range(max(map(len, levels))):
        for draft in (level[index] for level in levels if index < len(level)):
            questions.append(
                {
                    "id": f"{draft.type}-{draft.difficulty}-{index:04d}",
                    "question": draft.question,
                    "golden_answers": list(draft.golden_answers),
                    "supporting_titles": list(draft.supporting_titles),
                    "type": draft.type,
                    "difficulty": draft.difficulty,
                }
            )
    corpus = [
        {"id": f"p{index:04d}", "title": title, "contents": f"{title}\n{text}"}
        for index, (title, text) in enumerate(passages.items())
    ]
    return corpus, questions


def to_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return records as JSON Lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main(folder: Path) -> None:
    """Write both files to a folder."""
    for name, records in zip((CORPUS, QUESTIONS), generate(), strict=True):
        (folder / name).write_text(to_lines(records), encoding="utf-8", newline="\n")
        print(f"{folder / name}: {len(records)} records")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[3] / "assets")
