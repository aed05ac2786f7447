"""BM25 by Lucene through Pyserini's jar of Anserini: the reference, and for corpora beyond some million passages.

The virtual machine lives in a child process that is started by exec, never in this one and never by fork: a fork after
the start is a known hang. A child that dies or is late is replaced once per request; then the request fails as an
infrastructure failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_gym.envs.search.retrieval.base import KIND, Hit, check_parameters, check_search
from trace_gym.envs.search.retrieval.corpus import corpus_digest, duplicate_id, iter_corpus, to_passage
from trace_gym.envs.search.retrieval.folder import Progress, Reports, is_index, read_meta, write_folder, write_meta
from trace_gym.envs.search.retrieval.java import find_jar, find_java
from trace_gym.envs.search.retrieval.jvm import ChildLostError, JvmChild
from trace_gym.errors import BadInputError, InfrastructureError

FORMAT = "trace_gym lucene 1"


class LuceneBm25:
    """Searches a Lucene index folder; safe in threads.

    Args:
        folder: Made by `build_lucene_index`, by Anserini's own tools (with ``-storeRaw``), or downloaded.
        k1: How fast repeated occurrences saturate.
        b: How much long documents are discounted.
        heap_gb: Most memory for Java's heap.
        timeout_s: Deadline of a search.
        start_timeout_s: Deadline for Java to start and open the index.
    """

    def __init__(
        self,
        folder: Path,
        k1: float = 0.9,
        b: float = 0.4,
        *,
        heap_gb: float = 4.0,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start Java and open the index.

        Raises:
            MissingExtraError: If Java or Pyserini is missing.
            InfrastructureError: If Java does not start or cannot open the index.
        """
        check_parameters(k1, b)
        self._folder = folder
        self._settings = (k1, b, heap_gb)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._child: JvmChild | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.fingerprint = f"pyserini/{find_jar().stem}/{_index_name(folder)}/k1={k1:g},b={b:g}"
        try:
            self.size = self._running().size
        except ChildLostError as error:
            raise InfrastructureError(KIND, f"Java did not open the index {folder}: {error}") from error

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query; see `base.Retriever`."""
        queries = check_search(queries, k)
        if not queries:
            return []
        found = self._ask({"queries": queries, "k": k})
        return [[self._hit(*hit) for hit in hits] for hits in found]

    def _hit(self, id: str, score: float, raw: str) -> Hit:
        try:
            record = json.loads(raw)
            passage = to_passage({"id": id, **(record if isinstance(record, dict) else {"contents": raw})})
        except ValueError as error:
            raise InfrastructureError(
                KIND, f"the index {self._folder} does not hold the text of {id!r:.80}; build it with -storeRaw"
            ) from error
        return Hit(id, score, passage.title, passage.text)

    def _ask(self, request: dict[str, object]) -> list[list[tuple[str, float, str]]]:
        reasons = []
        for _ in range(2):
            child = None
            try:
                child = self._running()
                answer = child.ask(request, self._timeout_s)
            except ChildLostError as error:
                reasons.append(str(error))
                self._drop(child)
                continue
            if "error" in answer:
                raise InfrastructureError(KIND, f"Lucene failed: {answer['error']}")
            return list(answer["hits"])
        raise InfrastructureError(KIND, f"the Java process was lost twice: {'; then '.join(reasons)}")

    def _running(self) -> JvmChild:
        if self._owner != os.getpid():  # we are a fork: the child and the threads are our parent's
            self._owner, self._child, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            if self._child is None:
                self._child = JvmChild(self._folder, *self._settings, timeout_s=self._start_timeout_s)
            return self._child

    def _drop(self, child: JvmChild | None) -> None:
        if child is None:
            return
        child.stop()
        with self._lock:
            if self._child is child:
                self._child = None

    def close(self) -> None:
        """End the process; a later search starts another."""
        if self._owner == os.getpid():
            self._drop(self._child)


def is_lucene_folder(folder: Path) -> bool:
    """Return whether the folder holds a Lucene index."""
    return folder.is_dir() and any(folder.glob("segments_*"))


def _index_name(folder: Path) -> str:
    """Return what tells one index from another: the corpus if we built it, else the hash of Lucene's commit."""
    if not is_lucene_folder(folder):
        raise BadInputError(f"{folder} is no Lucene index.")
    if is_index(folder):
        return str(read_meta(folder, {"format": FORMAT})["corpus"])
    commit = max(folder.glob("segments_*"), key=lambda path: (len(path.name), path.name))
    return hashlib.sha256(commit.read_bytes()).hexdigest()[:16]


def build_lucene_index(corpus: Path, folder: Path, progress: Progress | None = None) -> None:
    """Index a corpus file with Anserini, with the texts.

    Args:
        corpus: File of JSON lines.
        folder: Where the index goes; nothing may be there.
        progress: Told the number of passages read so far.

    Raises:
        MissingExtraError: If Java or Pyserini is missing.
        BadInputError: For a bad line or an id that occurs twice.
        InfrastructureError: If Anserini fails.
    """
    java, jar = find_java(), find_jar()

    def write(new: Path) -> None:
        with tempfile.TemporaryDirectory(dir=new.parent, prefix="corpus-") as source:
            size = _write_collection(corpus, Path(source, "corpus.jsonl"), progress)
            command = [str(java.program), "-Xrs", "-cp", str(jar), "io.anserini.index.IndexCollection"]
            command += ["-collection", "JsonCollection", "-generator", "DefaultLuceneDocumentGenerator"]
            command += ["-input", source, "-index", str(new), "-threads", "2", "-storeRaw"]
            _run_anserini(command, progress)
        if not is_lucene_folder(new):
            raise InfrastructureError(KIND, f"Anserini made no index of {corpus}")
        write_meta(new, {"format": FORMAT, "anserini": jar.stem, "corpus": corpus_digest(corpus), "size": size})

    write_folder(folder, write)


def _run_anserini(command: list[str], progress: Progress | None) -> None:
    """Run Anserini's indexer; its log says from time to time how far it is."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    line = ""
    with subprocess.Popen(command, text=True, errors="replace", **streams) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                indexed = re.search(r"([0-9,]+) documents indexed", line)
                if indexed and progress is not None:
                    progress(int(indexed[1].replace(",", "")))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise InfrastructureError(KIND, f"Anserini ended with code {process.returncode}: {line.strip()[:300]}")


def _write_collection(corpus: Path, path: Path, progress: Progress | None) -> int:
    """Write the corpus in the form that Anserini reads; return the number of passages."""
    reports, hashes = Reports(progress), array("q")
    with path.open("w", encoding="ascii") as file:
        for number, passage in enumerate(iter_corpus(corpus), 1):
            record = {"id": passage.id, "title": passage.title, "contents": passage.contents}
            file.write(json.dumps(record) + "\n")
            hashes.append(hash(passage.id))
            reports.tell(number)
    reports.tell(len(hashes), last=True)
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    suspects, seen = set(values[counts > 1].tolist()), set()
    for passage in iter_corpus(corpus) if suspects else ():
        if hash(passage.id) in suspects:
            if passage.id in seen:
                raise duplicate_id(corpus, passage.id)
            seen.add(passage.id)
    return len(hashes)
