"""Dense retrieval: the inner product of a query's vector with every passage's, exactly or through faiss."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_gym.envs.search.retrieval.base import Hit, check_search
from trace_gym.envs.search.retrieval.dense_index import index_settings
from trace_gym.envs.search.retrieval.encoder import TextEncoder
from trace_gym.envs.search.retrieval.folder import read_meta
from trace_gym.envs.search.retrieval.passages import PassageStore, load_array
from trace_gym.errors import require, unknown_name

METHODS = ("auto", "numpy", "flat", "ivf", "hnsw")
_BLOCK = 16_384  # rows that are multiplied at a time
_HNSW_LINKS, _HNSW_WIDTH = 32, 128
_IVF_PROBES = 32

Vectors = npt.NDArray[np.float32]
Found = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]  # scores and rows, [queries, k], best first


class DenseRetriever:
    """Searches the vectors of an index folder; safe in threads.

    Args:
        folder: Made by `dense_index.build_dense_index` with an equal encoder.
        encoder: Encodes the queries.
        dtype: Of the vectors on disk.
        method: ``"numpy"`` and ``"flat"`` (faiss) are exact and map the vectors from disk; ``"ivf"`` and ``"hnsw"``
            (faiss) are approximate and quick, built on first use and kept beside the vectors. ``"auto"`` is ``"flat"``
            if faiss is installed, else ``"numpy"``.
    """

    def __init__(self, folder: Path, encoder: TextEncoder, dtype: str = "float32", method: str = "auto") -> None:
        """Open the index.

        Raises:
            BadInputError: If the index was built with other settings.
            MissingExtraError: If the method needs faiss and it is not installed.
        """
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        if method == "auto":
            method = "flat" if dtype == "float32" and importlib.util.find_spec("faiss") else "numpy"
        meta = read_meta(folder, index_settings(encoder, dtype))
        self.size = int(meta["size"])
        config = ",".join(f"{name}={value}" for name, value in encoder.config.to_dict().items())
        approximate = f"/{method}" if method in ("ivf", "hnsw") else ""
        self.fingerprint = f"dense/{meta['corpus']}/{dtype}/{config}{approximate}"
        self._encoder = encoder
        self._passages = PassageStore(folder)
        self._vectors = load_array(folder, "vectors")
        self._find = _finder(method, folder, self._vectors)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query; see `base.Retriever`."""
        queries = check_search(queries, k)
        asked = [number for number, query in enumerate(queries) if query.strip()]
        results: list[list[Hit]] = [[] for _ in queries]
        if not asked or not self.size:
            return results
        scores, rows = self._find(self._encoder.encode_queries([queries[number] for number in asked]), k)
        for number, best, where in zip(asked, scores.tolist(), rows.tolist(), strict=True):
            for score, row in zip(best, where, strict=True):
                if row >= 0:  # an approximate index may find fewer
                    id, title, text = self._passages[row]
                    results[number].append(Hit(id, score, title, text))
        return results

    def close(self) -> None:
        """Do nothing: the files are unmapped with the object."""


def _finder(method: str, folder: Path, vectors: npt.NDArray[Any]) -> Callable[[Vectors, int], Found]:
    """Return the function that finds the best rows for query vectors."""
    if method == "numpy":
        return lambda queries, k: _best_rows(vectors, queries, min(k, len(vectors)))
    faiss = require("faiss", "search")
    if method == "flat":
        rows, metric = np.asarray(vectors, np.float32), faiss.METRIC_INNER_PRODUCT  # no copy of float32
        return lambda queries, k: faiss.knn(queries, rows, min(k, len(rows)), metric=metric)
    index = _faiss_index(faiss, method, folder, vectors)
    return lambda queries, k: index.search(queries, min(k, len(vectors)))


def _best_rows(vectors: npt.NDArray[Any], queries: Vectors, k: int) -> Found:
    """Multiply block by block; equal scores in the order of the rows."""
    scores = np.empty((len(queries), 0), np.float32)
    rows = np.empty((len(queries), 0), np.int64)
    for first in range(0, len(vectors), _BLOCK):
        block = queries @ np.asarray(vectors[first : first + _BLOCK], np.float32).T
        scores = np.concatenate([scores, block], axis=1)
        here = np.broadcast_to(np.arange(first, first + block.shape[1]), block.shape)
        rows = np.concatenate([rows, here], axis=1)
        if scores.shape[1] > k:  # keep what ties with the k-th as well as the k best
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def _faiss_index(faiss: Any, method: str, folder: Path, vectors: npt.NDArray[Any]) -> Any:
    """Return the approximate index kept in the folder; build it if it is not there."""
    path = folder / f"{method}.faiss"
    if path.is_file():
        index = faiss.read_index(str(path))
    else:
        dimension = vectors.shape[1]
        if method == "hnsw":
            index = faiss.IndexHNSWFlat(dimension, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        else:
            lists = max(1, int(4 * len(vectors) ** 0.5))
            index = faiss.index_factory(dimension, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
            step = max(1, len(vectors) // (lists * 64))
            index.train(np.ascontiguousarray(vectors[::step], np.float32))
        for first in range(0, len(vectors), _BLOCK):
            index.add(np.ascontiguousarray(vectors[first : first + _BLOCK], np.float32))
        part = path.with_suffix(".part")
        faiss.write_index(index, str(part))
        part.rename(path)
    if method == "hnsw":
        index.hnsw.efSearch = _HNSW_WIDTH
    else:
        index.nprobe = _IVF_PROBES
    return index
