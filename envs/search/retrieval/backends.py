"""The backends by name: how each is opened, and how an index for it is built."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_gym.cache import cache_folder
from trace_gym.envs.search.retrieval.base import Retriever
from trace_gym.envs.search.retrieval.corpus import corpus_digest, corpus_path
from trace_gym.envs.search.retrieval.encoder import EncoderConfig, TextEncoder
from trace_gym.envs.search.retrieval.folder import Progress, building, is_index
from trace_gym.errors import unknown_name

log = logging.getLogger("trace_gym.search")
DEFAULT_URL = "http://127.0.0.1:8000"
_LARGE = 20_000_000  # bytes of a corpus whose indexing is worth a line


def build(backend: str, corpus: Path, folder: Path, progress: Progress | None = None, **options: Any) -> None:
    """Build an index folder for a backend.

    Args:
        backend: ``"embedded"``, ``"pyserini"`` or ``"dense"``.
        corpus: File of JSON lines.
        folder: Where the index goes; nothing may be there.
        progress: Told the number of passages done.
        **options: Of the encoder, for ``"dense"``.

    Raises:
        BadInputError: For a bad line, an id that occurs twice, or if something is at the place.
        MissingExtraError: If the backend needs something that is not installed.
        InfrastructureError: If the engine fails.
    """
    if backend == "embedded":
        from trace_gym.envs.search.retrieval.bm25_index import build_index

        build_index(corpus, folder, progress)
    elif backend == "pyserini":
        from trace_gym.envs.search.retrieval.lucene import build_lucene_index

        build_lucene_index(corpus, folder, progress)
    elif backend == "dense":
        from trace_gym.envs.search.retrieval.dense_index import build_dense_index

        dtype = options.pop("dtype", "float32")
        build_dense_index(corpus, folder, progress, _encoder(**options), dtype)
    else:
        raise unknown_name("backend with an index", backend, ["embedded", "pyserini", "dense"])


def _indexed(corpus: str | Path | None, name: str, make: Callable[[Path, Path, Progress], None]) -> Path:
    """Return the folder of an index: the one given, or the cached one of a corpus file, built if need be."""
    if corpus is not None and Path(corpus).is_dir():
        return Path(corpus)
    path = corpus_path(corpus)
    folder = cache_folder("search") / f"{name.replace(' ', '-')}-{corpus_digest(path)}"
    if is_index(folder):
        return folder
    with building(folder):
        if not is_index(folder):  # another process may have built it meanwhile
            size = path.stat().st_size
            level = logging.WARNING if size > _LARGE else logging.DEBUG
            log.log(level, "search: indexing %s (%.0f MB) into %s", path, size / 1e6, folder)
            make(path, folder, lambda done: log.log(level, "search: %s passages indexed", f"{done:,}"))
    return folder


def _embedded(corpus: str | Path | None, k1: float = 0.9, b: float = 0.4) -> Retriever:
    from trace_gym.envs.search.retrieval.analyzer import ANALYZER_VERSION
    from trace_gym.envs.search.retrieval.bm25 import EmbeddedBm25
    from trace_gym.envs.search.retrieval.bm25_index import FORMAT, build_index

    return EmbeddedBm25(_indexed(corpus, f"{FORMAT}-{ANALYZER_VERSION}", build_index), k1, b)


def _pyserini(
    corpus: str | Path | None,
    k1: float = 0.9,
    b: float = 0.4,
    heap_gb: float = 4.0,
    timeout_s: float = 60.0,
    start_timeout_s: float = 120.0,
) -> Retriever:
    from trace_gym.envs.search.retrieval import java, jvm, lucene

    jar = java.find_jar()
    java.find_java()
    if isinstance(corpus, str) and not Path(corpus).exists() and "/" not in corpus and os.sep not in corpus:
        folder = jvm.prebuilt_index(corpus, lambda line: log.warning("search: %s", line))
    else:
        folder = _indexed(corpus, f"{lucene.FORMAT}-{jar.stem}", lucene.build_lucene_index)
    return lucene.LuceneBm25(folder, k1, b, heap_gb=heap_gb, timeout_s=timeout_s, start_timeout_s=start_timeout_s)


def _encoder(batch_size: int = 32, device: str | None = None, **config: Any) -> TextEncoder:
    return TextEncoder(EncoderConfig(**config), batch_size=batch_size, device=device)


def _dense(
    corpus: str | Path | None,
    method: str = "auto",
    dtype: str = "float32",
    batch_size: int = 32,
    device: str | None = None,
    **config: Any,
) -> Retriever:
    from trace_gym.envs.search.retrieval.dense import DenseRetriever
    from trace_gym.envs.search.retrieval.dense_index import build_dense_index, index_settings

    encoder = _encoder(batch_size, device, **config)
    settings = json.dumps(index_settings(encoder, dtype), sort_keys=True)
    name = f"dense-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    folder = _indexed(corpus, name, lambda path, new, told: build_dense_index(path, new, told, encoder, dtype))
    return DenseRetriever(folder, encoder, dtype, method)


def _http(corpus: str | Path | None, url: str = "", timeout_s: float = 30.0, retries: int = 3) -> Retriever:
    from trace_gym.envs.search.retrieval.client import HttpRetriever

    return HttpRetriever(url or str(corpus or DEFAULT_URL), timeout_s=timeout_s, retries=retries)


BACKENDS: dict[str, Callable[..., Retriever]] = {  # each takes the corpus, then its options
    "embedded": _embedded,
    "pyserini": _pyserini,
    "dense": _dense,
    "http": _http,
}
