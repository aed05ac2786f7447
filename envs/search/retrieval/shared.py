"""Opening a backend by name: one engine for all environments of a process that ask for the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trace_gym.envs.search.retrieval.backends import BACKENDS, log
from trace_gym.envs.search.retrieval.base import Hit, Retriever
from trace_gym.envs.search.retrieval.corpus import corpus_path
from trace_gym.envs.search.retrieval.encoder import EncoderConfig
from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError, unknown_name


class SharedRetriever:
    """A share of an engine; used like the engine. The last share that is closed, or forgotten, closes it."""

    def __init__(self, engine: Retriever, give_back: Callable[[], None]) -> None:
        """Make a share; use `open_retriever`."""
        self.engine = engine
        self.search: Callable[..., list[list[Hit]]] = engine.search
        self._give_back = weakref.finalize(self, give_back)

    @property
    def fingerprint(self) -> str:
        """Return what decides the results, in one line."""
        return self.engine.fingerprint

    @property
    def size(self) -> int:
        """Return the number of passages."""
        return self.engine.size

    def close(self) -> None:
        """Give the share back; doing so again does nothing."""
        self._give_back()


class _Shares:
    """The engines that are open, by what was asked for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: collecting a share may interrupt a caller that holds it
        self._open: dict[str, tuple[Retriever, int]] = {}

    def take(self, key: str, make: Callable[[], Retriever]) -> SharedRetriever:
        with self._lock:
            engine, shares = self._open.get(key) or (make(), 0)
            self._open[key] = (engine, shares + 1)
        return SharedRetriever(engine, lambda: self._give_back(key))

    def _give_back(self, key: str) -> None:
        with self._lock:
            engine, shares = self._open.pop(key)
            if shares > 1:
                self._open[key] = (engine, shares - 1)
                return
        engine.close()

    def renew_lock(self) -> None:
        self._lock = threading.RLock()


_shares = _Shares()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shares.renew_lock)
_no_lucene: list[str] = []  # why "auto" gave up on Pyserini, once it has


def open_retriever(backend: str = "auto", corpus: str | Path | None = None, **options: Any) -> SharedRetriever:
    """Open a search engine, or take a share of one that is open with equal arguments.

    Args:
        backend: ``"embedded"``, ``"pyserini"``, ``"dense"``, ``"hybrid"``, ``"http"``, or ``"auto"``: Pyserini if it
            is installed and Java starts, else embedded; both give the same lists.
        corpus: File of JSON lines, or folder of an index that fits the backend; None for the bundled corpus. For
            ``"pyserini"`` also the name of a prebuilt index; for ``"http"`` the server's URL.
        **options: Of the backend, such as ``k1`` and ``b``.

    Returns:
        The engine; close it when it is no longer needed.

    Raises:
        BadInputError: For an unknown backend or option, a bad corpus, or an index built with other settings.
        MissingExtraError: If the backend needs something that is not installed.
        InfrastructureError: If the engine cannot be reached or started.
    """
    if backend == "auto":
        return _open_auto(corpus, options)
    known = _options_of(backend)
    for name in options:
        if name not in known:
            raise unknown_name(f"option of the backend {backend}", name, known)
    key = json.dumps([backend, _identity(corpus), options], sort_keys=True, default=str)
    return _shares.take(key, lambda: _MAKERS[backend](corpus, **options))


def _open_auto(corpus: str | Path | None, options: dict[str, Any]) -> SharedRetriever:
    if corpus is not None and Path(corpus).is_dir():  # an index fits one of them only
        return open_retriever("pyserini" if any(Path(corpus).glob("segments_*")) else "embedded", corpus, **options)
    if not _no_lucene:
        try:
            return open_retriever("pyserini", corpus, **options)
        except (MissingExtraError, InfrastructureError) as error:
            _no_lucene.append(str(error))
            expected = isinstance(error, MissingExtraError) and "Java" not in str(error)
            log.log(logging.INFO if expected else logging.WARNING, "search: embedded, not pyserini: %s", error)
    return open_retriever("embedded", corpus, **options)


def _identity(corpus: str | Path | None) -> list[Any]:
    """Return what tells a corpus from another, and from itself after a change."""
    try:
        path = corpus_path(corpus) if corpus is None else Path(corpus)
        seen = path.stat()
    except OSError:
        return [str(corpus)]
    return [str(path.absolute()), seen.st_mtime_ns, seen.st_size]


def _options_of(backend: str) -> list[str]:
    """Return the names of a backend's options."""
    if backend not in _MAKERS:
        raise unknown_name("backend", backend, [*_MAKERS, "auto"])
    names = list(inspect.signature(_MAKERS[backend]).parameters)[1:]
    if "dense" in names:
        names += _options_of("dense")
    if "config" in names:
        names += [field.name for field in dataclasses.fields(EncoderConfig)]
    return [name for name in names if name not in ("dense", "config")]


def _hybrid(
    corpus: str | Path | None, lexical: str = "auto", k1: float = 0.9, b: float = 0.4, **dense: Any
) -> Retriever:
    from trace_gym.envs.search.retrieval.hybrid import HybridRetriever

    if corpus is not None and Path(corpus).is_dir():
        raise BadInputError(f"The backend hybrid needs two indexes: give the corpus file, not {corpus}.")
    first = open_retriever(lexical, corpus, k1=k1, b=b)
    try:
        return HybridRetriever(first, open_retriever("dense", corpus, **dense))
    except BaseException:
        first.close()
        raise


_MAKERS: dict[str, Callable[..., Retriever]] = {**BACKENDS, "hybrid": _hybrid}
