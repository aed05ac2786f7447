"""The index of the embedded BM25 on disk: built in one stream, then memory-mapped.

Building needs the memory of the vocabulary, the ids and one block of tokens, however long the corpus is. What k1 and b
decide is no part of the index. Lucene keeps a document's length in one byte, and so does this index, since the scores
depend on it.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trace_gym.envs.search.retrieval.analyzer import ANALYZER_VERSION, EnglishAnalyzer
from trace_gym.envs.search.retrieval.base import Passage
from trace_gym.envs.search.retrieval.corpus import corpus_digest, duplicate_id, iter_corpus
from trace_gym.envs.search.retrieval.folder import Progress, Reports, read_meta, write_folder, write_meta
from trace_gym.envs.search.retrieval.passages import (
    Blobs,
    PassageStore,
    PassageWriter,
    create_array,
    load_array,
    save_array,
)

FORMAT = "trace_gym bm25 1"
MAX_TF = 65_535
_BLOCK_TOKENS = 1_000_000


def encode_length(length: int) -> int:
    """Return Lucene's byte for a document length (``SmallFloat.intToByte4``): four significant bits, rounded down."""
    if length < 24:
        return length
    rest = length - 24
    if rest < 8:
        return 24 + rest
    shift = rest.bit_length() - 4
    return 24 + (((rest >> shift) & 7) | ((shift + 1) << 3))


def decode_length(code: int) -> int:
    """Return the length that a byte stands for."""
    if code < 24:
        return code
    shift = ((code - 24) >> 3) - 1
    bits = (code - 24) & 7
    return 24 + (bits if shift < 0 else (bits | 8) << shift)


class Bm25Index:
    """An index folder, memory-mapped.

    Attributes:
        meta: What it was built from and with.
        starts: int64 ``[terms + 1]``: where the postings of a term begin.
        docs: int32 ``[postings]``: document numbers, ascending within a term.
        tfs: uint16 ``[postings]``: how often the term occurs in the document.
        lengths: uint8 ``[documents]``: Lucene's length bytes.
        ranks: int32 ``[documents]``: place of the document among the sorted ids; breaks ties.
        passages: The texts.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder.

        Raises:
            BadInputError: If it is no such index or was built with other settings.
        """
        self.meta = read_meta(folder, {"format": FORMAT, "analyzer": ANALYZER_VERSION})
        self.starts = load_array(folder, "starts")
        self.docs, self.tfs = load_array(folder, "docs"), load_array(folder, "tfs")
        self.lengths, self.ranks = load_array(folder, "lengths"), load_array(folder, "ranks")
        self.passages = PassageStore(folder)
        self._terms = Blobs(folder, "terms")

    def term_number(self, term: str) -> int | None:
        """Return the number of a term, None if no document has it."""
        wanted = term.encode("utf-8", "surrogatepass")
        place = bisect_left(range(len(self._terms)), wanted, key=self._terms.__getitem__)
        return place if place < len(self._terms) and self._terms[place] == wanted else None


def build_index(corpus: Path, folder: Path, progress: Progress | None = None) -> None:
    """Index a corpus file.

    Args:
        corpus: File of JSON lines.
        folder: Where the index goes; nothing may be there.
        progress: Told the number of passages read so far.

    Raises:
        BadInputError: For a bad line or an id that occurs twice.
        MissingExtraError: If the stemmer is not installed.
    """
    write_folder(folder, lambda new: _Build(new, progress).run(corpus))


class _Build:
    """One pass over a corpus into blocks of sorted postings, then one over the blocks into the final arrays."""

    def __init__(self, folder: Path, progress: Progress | None) -> None:
        self.folder = folder
        self.reports = Reports(progress)
        self.vocabulary: dict[str, int] = {}  # term -> number in order of appearance
        self.ids: list[str] = []
        self.lengths = bytearray()
        self.tokens = 0
        self.blocks = 0
        self.frequencies = np.zeros(0, np.int64)  # documents per term

    def run(self, corpus: Path) -> None:
        digest = corpus_digest(corpus)
        self._read(iter_corpus(corpus))
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        for one, other in itertools.pairwise(order):
            if self.ids[one] == self.ids[other]:
                raise duplicate_id(corpus, self.ids[one])
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        save_array(self.folder, "ranks", ranks)
        save_array(self.folder, "lengths", np.frombuffer(self.lengths, np.uint8))
        self._merge()
        meta = {
            "format": FORMAT,
            "analyzer": ANALYZER_VERSION,
            "corpus": digest,
            "size": len(self.ids),
            "documents": len(self.ids) - self.lengths.count(0),  # Lucene does not count empty ones
            "tokens": self.tokens,
            "terms": len(self.vocabulary),
        }
        write_meta(self.folder, meta)

    def _read(self, passages: Iterable[Passage]) -> None:
        analyze, vocabulary = EnglishAnalyzer(), self.vocabulary
        tokens, counts = array("i"), array("i")
        with PassageWriter(self.folder) as writer:
            for passage in passages:
                writer.add(passage)
                terms = analyze(passage.contents)
                tokens.extend([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
                counts.append(len(terms))
                self.ids.append(passage.id)
                self.lengths.append(encode_length(len(terms)))
                if len(tokens) > _BLOCK_TOKENS:
                    self._write_block(tokens, counts)
                    tokens, counts = array("i"), array("i")
                self.reports.tell(len(self.ids))
        self._write_block(tokens, counts)
        self.reports.tell(len(self.ids), last=True)

    def _write_block(self, tokens: array[int], counts: array[int]) -> None:
        """Write a block's postings, sorted by term, then document."""
        size = max(len(counts), 1)
        docs = np.repeat(np.arange(len(counts)), np.frombuffer(counts, np.int32))
        pairs, tfs = np.unique(np.frombuffer(tokens, np.int32).astype(np.int64) * size + docs, return_counts=True)
        terms, docs = np.divmod(pairs, size)
        docs += len(self.ids) - len(counts)
        save_array(self.folder, f"block{self.blocks}.terms", terms.astype(np.int32))
        save_array(self.folder, f"block{self.blocks}.docs", docs.astype(np.int32))
        save_array(self.folder, f"block{self.blocks}.tfs", np.minimum(tfs, MAX_TF).astype(np.uint16))
        found = np.bincount(terms, minlength=len(self.vocabulary))
        found[: len(self.frequencies)] += self.frequencies
        self.frequencies = found
        self.tokens += len(tokens)
        self.blocks += 1

    def _merge(self) -> None:
        """Put the blocks' postings where they belong, terms in the order of their bytes."""
        encoded = [term.encode("utf-8", "surrogatepass") for term in self.vocabulary]
        order = np.array(sorted(range(len(encoded)), key=encoded.__getitem__), np.int64)
        starts = np.concatenate([[0], np.cumsum(self.frequencies[order])]).astype(np.int64)
        save_array(self.folder, "starts", starts)
        (self.folder / "terms.bin").write_bytes(b"".join([encoded[number] for number in order]))
        sizes = np.array([0, *(len(encoded[number]) for number in order)], np.int64)
        save_array(self.folder, "terms.bounds", np.cumsum(sizes))

        fill = np.empty(len(order), np.int64)  # by number of appearance: where the next posting goes
        fill[order] = starts[:-1]
        docs = create_array(self.folder, "docs", np.int32, (int(starts[-1]),))
        tfs = create_array(self.folder, "tfs", np.uint16, (int(starts[-1]),))
        for block in range(self.blocks):
            terms = load_array(self.folder, f"block{block}.terms")
            found, first, counts = np.unique(terms, return_index=True, return_counts=True)
            places = np.arange(len(terms)) + np.repeat(fill[found] - first, counts)
            docs[places] = load_array(self.folder, f"block{block}.docs")
            tfs[places] = load_array(self.folder, f"block{block}.tfs")
            fill[found] += counts
            for name in ("terms", "docs", "tfs"):
                (self.folder / f"block{block}.{name}.npy").unlink()
