"""What BM25 finds of what a question needs: recall of gold titles, embedded beside Lucene, question by question.

Run by hand: ``python tests/benchmarks/recall.py FOLDER``. The folder holds question sets ``NAME.jsonl`` (any schema of
``trace-gym data show``, with supporting titles) and their passages ``NAME_corpus.jsonl``. All passages together are
one corpus, each once. Lucene is measured where Pyserini and Java are installed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from trace_gym.envs.search.retrieval import java, open_retriever
from trace_gym.envs.search.retrieval.corpus import iter_corpus
from trace_gym.envs.search.scoring import supporting_recall
from trace_gym.envs.search.tasks import Question, load_questions
from trace_gym.errors import MissingExtraError

SETTINGS = ((0.9, 0.4), (1.2, 0.75))
DEPTHS = (3, 10)


def write_union(files: list[Path], path: Path) -> int:
    """Write all passages into one corpus, each once; return their number."""
    passages = dict.fromkeys((passage.title, passage.text) for file in files for passage in iter_corpus(file))
    with path.open("w") as file:
        for number, (title, text) in enumerate(passages):
            file.write(json.dumps({"id": f"d{number}", "title": title, "contents": f"{title}\n{text}"}) + "\n")
    return len(passages)


def engines() -> list[str]:
    """Return the engines that can be measured here."""
    try:
        java.find_jar()
        java.find_java()
    except MissingExtraError as error:
        print(f"lucene is not measured: {error}")
        return ["embedded"]
    return ["embedded", "pyserini"]


def search(engine: str, corpus: Path, questions: list[Question], k1: float, b: float) -> list[list[tuple[str, str]]]:
    """Return id and title of the best passages for each question."""
    share = open_retriever(engine, corpus, k1=k1, b=b)
    found = share.search([question.question for question in questions], max(DEPTHS))
    share.close()
    return [[(hit.id, hit.title) for hit in hits] for hits in found]


def recall(question: Question, titles: list[str]) -> float:
    """Return the share of a question's gold titles among some titles."""
    return supporting_recall(titles, question.supporting_titles) or 0.0


def main() -> None:
    """Print the table and the numbers of questions with other lists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="NAME.jsonl and NAME_corpus.jsonl")
    folder = parser.parse_args().folder
    corpora = sorted(folder.glob("*_corpus.jsonl"))
    sets = {file.stem: file for file in sorted(folder.glob("*.jsonl")) if file not in corpora}
    tables = {name: [q for q in load_questions(file).questions() if q.supporting_titles] for name, file in sets.items()}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus.jsonl"
        print(f"{write_union(corpora, corpus):,} passages; gold titles found @{' / @'.join(map(str, DEPTHS))}")
        names = engines()
        for name, questions in tables.items():
            for k1, b in SETTINGS:
                lists = {engine: search(engine, corpus, questions, k1, b) for engine in names}
                for engine, found in lists.items():
                    means = []
                    for depth in DEPTHS:
                        titles = [[title for _, title in hits[:depth]] for hits in found]
                        shares = [recall(q, shown) for q, shown in zip(questions, titles, strict=True)]
                        means.append(float(np.mean(shares)))
                        ratios[f"{name}_{engine}_{k1}_{b}_at_{depth}"] = means[-1]
                    numbers = " / ".join(f"{mean:.3f}" for mean in means)
                    print(f"{name:20} {len(questions):4}  k1 {k1} b {b:4}  {engine:9} {numbers}")
                if len(lists) == 2:
                    same = sum(ours == theirs for ours, theirs in zip(*lists.values(), strict=True))
                    ratios[f"{name}_{k1}_{b}_same_lists"] = same / len(questions)
                    print(f"{'':20} identical lists: {same} of {len(questions)}")
    print(json.dumps({name: round(value, 4) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
