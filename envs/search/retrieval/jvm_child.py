"""The process that holds the Java virtual machine; started by exec as a script, by `lucene.py` only.

Reads requests as JSON lines from standard input and answers each with one line: ``{"id", "queries", "k"}`` gives
``{"id", "hits"}`` or ``{"id", "error"}``. To search, it needs pyjnius and Anserini's jar, nothing of Pyserini's Python
code, whose import would start a virtual machine with options of its own. It ends with its parent. A process with a
virtual machine must not fork, so nothing else happens here.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_CLAUSES = 65_536  # distinct terms of a query; Lucene's own limit of 1,024 refuses a long question


def start_jvm(options: dict[str, Any]) -> None:
    """Start the virtual machine; `options` as made by `lucene.jvm_options`."""
    os.environ["JAVA_HOME"] = options["java_home"]  # what pyjnius loads
    os.environ.setdefault("OPENAI_API_KEY", "none")  # some releases of Pyserini cannot be imported without
    import jnius_config

    jnius_config.add_classpath(options["jar"])
    jnius_config.add_options(*options["jvm"])
    import jnius  # noqa: F401


class Searcher:
    """Anserini's searcher over one index folder."""

    def __init__(self, index: str, k1: float, b: float) -> None:
        """Open the index."""
        from jnius import autoclass

        self._string, self._list = autoclass("java.lang.String"), autoclass("java.util.ArrayList")
        autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(MAX_CLAUSES)
        self._searcher = autoclass("io.anserini.search.SimpleSearcher")(index)
        self._searcher.set_bm25(k1, b)
        self._threads = min(4, os.cpu_count() or 1)

    def size(self) -> int:
        """Return the number of documents."""
        return int(self._searcher.get_total_num_docs())

    def search(self, queries: list[str], k: int) -> list[list[tuple[str, float, str]]]:
        """Return id, score and stored record of the best documents of each query."""
        if len(queries) == 1:
            return [self._hits(self._searcher.search(self._java(queries[0]), k))]
        texts, names = self._list(), self._list()
        for number, query in enumerate(queries):
            texts.add(self._java(query))
            names.add(str(number))
        found = self._searcher.batch_search(texts, names, k, self._threads)
        return [self._hits(found.get(str(number))) for number in range(len(queries))]

    def _java(self, text: str) -> Any:
        """Make a Java string; pyjnius by itself damages characters outside the basic plane."""
        return text if max(text, default="") < "\ud800" else self._string(text.encode("utf-8", "replace"), "UTF-8")

    def _hits(self, found: Any) -> list[tuple[str, float, str]]:
        return [(hit.docid, float(hit.score), hit.lucene_document.get("raw") or "") for hit in found]


def resolve_prebuilt(name: str, answer: Callable[[dict[str, Any]], None]) -> None:
    """Tell the folder of one of Pyserini's prebuilt indexes; download it, after telling the size, unless it is there.

    Pyserini's catalogue is made by Java since release 1.6, so it is read here, under our virtual machine.
    """
    from pyserini import util

    if name not in util.TF_INDEX_INFO:
        answer({"unknown": sorted(util.TF_INDEX_INFO)})
        return
    if not util.check_downloaded(name):
        size = util.TF_INDEX_INFO[name].get("size compressed (bytes)", 0)
        answer({"bytes": size, "folder": str(util.get_cache_home())})
    answer({"index": str(util.download_prebuilt_index(name, verbose=False))})


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    requests.put(b"")


def _end_with(parent: int) -> None:
    """Leave when the parent is gone; a child of its that forked may still hold our input open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Serve until the input ends."""
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if os.name == "posix":
        threading.Thread(target=_end_with, args=(options["parent"],), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what Java prints goes to the log

    def answer(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=answers, flush=True)

    # Always read, lest the parent be stuck writing while we search.
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        start_jvm(options)
        if "prebuilt" in options:
            resolve_prebuilt(options["prebuilt"], answer)
            os._exit(0)
        searcher = Searcher(options["index"], options["k1"], options["b"])
        answer({"id": 0, "size": searcher.size()})
    except Exception as error:
        answer({"id": 0, "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    while line := requests.get():
        request = json.loads(line)
        try:
            hits = searcher.search(request["queries"], request["k"])
            answer({"id": request["id"], "hits": hits})
        except Exception as error:
            answer({"id": request["id"], "error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # the virtual machine has threads of its own


if __name__ == "__main__":
    main()
