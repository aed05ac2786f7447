"""What searching costs: index, latency and memory of the embedded engine, beside Lucene, and through the server.

Run by hand: ``python tests/benchmarks/retrieval.py [--quick] [--passages N]``. The text is synthetic and follows Zipf's
law: good for speed, not for language. Ways that are compared take turns in one run; the last line is one JSON object
with the ratios. Where Pyserini and Java are installed: ``pyserini`` is its LuceneSearcher, with the passages that it
found read from Lucene's records; ``lucene`` is Anserini's searcher alone, its records left as they are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from trace_gym.envs.search.retrieval import java, open_retriever
from trace_gym.envs.search.retrieval.analyzer import EnglishAnalyzer
from trace_gym.envs.search.retrieval.backends import build
from trace_gym.envs.search.retrieval.base import Hit, Retriever
from trace_gym.envs.search.retrieval.corpus import to_passage
from trace_gym.errors import MissingExtraError

STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
).split()
VOCABULARY = 400_000
K = 3


def pseudo_word(number: int) -> str:
    """Return a word that no stemmer changes."""
    letters = ""
    number += 1
    while number:
        number, digit = divmod(number, 36)
        letters += "bdfgklmnprtv"[digit // 3] + "aou"[digit % 3]
    return letters + "k"


def write_corpus(path: Path, passages: int, queries: int) -> list[str]:
    """Write a corpus and return questions about it: seven content words of a passage and five stop words.

    Words follow the law of Zipf and Mandelbrot, lengths a lognormal law with mean 70; a quarter of the words of a
    passage are of its topic.
    """
    rng = np.random.default_rng(0)
    words = np.array(STOP_WORDS + [pseudo_word(number) for number in range(VOCABULARY)], dtype=object)
    weights = (np.arange(len(words)) + 3.7) ** -1.07
    shares = np.cumsum(weights / weights.sum())
    asked = set(np.linspace(0, passages - 1, queries).astype(int).tolist())
    questions = []
    with path.open("w") as file:
        for number in range(passages):
            drawn = np.searchsorted(shares, rng.random(max(8, int(rng.lognormal(np.log(70) - 0.08, 0.4)))))
            topical = rng.random(len(drawn)) < 0.25
            topic = len(STOP_WORDS) + int((VOCABULARY - 400) ** rng.random())
            drawn[topical] = topic + drawn[topical] % 300
            text = " ".join(words[drawn])
            file.write(json.dumps({"id": f"d{number}", "contents": f"{' '.join(words[drawn[:3]])}\n{text}"}) + "\n")
            if number in asked:
                content = rng.permutation(drawn[drawn >= len(STOP_WORDS)])[:7]
                questions.append(" ".join(words[[*content, *rng.integers(0, len(STOP_WORDS), 5)]]))
    return questions


def memory(name: str, pid: int | str = "self") -> float:
    """Return a field of a process's status, in MB (0 where the system does not tell)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().split("\n")
    except OSError:
        return 0.0
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def mapped(name: str) -> float:
    """Return how much of a file this process has in memory, in MB (0 where the system does not tell)."""
    try:
        maps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0.0
    return sum(int(part.partition("Rss:")[2].split()[0]) / 1024 for part in maps.split(f"/{name}\n")[1:])


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process, so that its memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def build_alone(backend: str, corpus: Path, folder: Path) -> dict[str, float]:
    """Build an index; return seconds and memory."""
    EnglishAnalyzer()("load the stemmer")
    before, began, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    build(backend, corpus, folder)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "peak_mb": memory("VmHWM") - before}


def search_alone(folder: Path, questions: list[str]) -> dict[str, float]:
    """Search one by one; return milliseconds and memory, in steady state."""
    EnglishAnalyzer()("load the stemmer")
    before, began = memory("VmRSS"), time.perf_counter()
    engine = open_retriever("embedded", folder)
    opened = time.perf_counter() - began
    times = []
    for round_ in range(3):
        for question in questions:
            began = time.perf_counter()
            engine.search([question], K)
            if round_:
                times.append(1000 * (time.perf_counter() - began))
    used = memory("VmRSS") - before - mapped("passages.bin")
    quantiles = statistics.quantiles(times, n=100)
    return {
        "open_s": opened,
        "p50": quantiles[49],
        "p99": quantiles[98],
        "qps": 1000 / statistics.mean(times),
        "mb": used,
    }


def open_pyserini(index: Path) -> Callable[[str], list[Any]]:
    """Open Pyserini's own searcher, as its users do; return a search that gives what ours gives."""
    # Its encoders import torch and more, which BM25 does not need.
    sys.modules["pyserini.encode"] = mock.MagicMock()
    from pyserini.search.lucene import LuceneSearcher

    searcher = LuceneSearcher(str(index))
    searcher.set_bm25(0.9, 0.4)

    def search(question: str) -> list[Any]:
        passages = [
            (hit.docid, hit.score, to_passage(json.loads(hit.lucene_document.get("raw"))))
            for hit in searcher.search(question, K)
        ]
        return [Hit(id, score, passage.title, passage.text) for id, score, passage in passages]

    return search


def lucene_beside_embedded(folder: Path, lucene: Path, questions: list[str]) -> dict[str, float]:
    """Search in one thread, taking turns; the virtual machine is in this very process, as in Pyserini."""
    from trace_gym.envs.search.retrieval.jvm import jvm_options
    from trace_gym.envs.search.retrieval.jvm_child import Searcher, start_jvm

    start_jvm(jvm_options(4.0))
    bare, engine = Searcher(str(lucene), 0.9, 0.4), open_retriever("embedded", folder)
    ways: dict[str, Callable[[str], Any]] = {
        "pyserini": open_pyserini(lucene),
        "lucene": lambda question: bare.search([question], K),
        "embedded": lambda question: engine.search([question], K)[0],
    }
    same = sum([hit.id for hit in ways["pyserini"](q)] == [hit.id for hit in ways["embedded"](q)] for q in questions)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    medians: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, search in ways.items():
            times = []
            for question in questions:
                began = time.perf_counter()
                search(question)
                times.append(time.perf_counter() - began)
            rates[name].append(1 / statistics.mean(times))
            medians[name].append(1000 * statistics.median(times))
    result = {f"{name}_qps": statistics.median(values) for name, values in rates.items()}
    result |= {f"{name}_p50": statistics.median(values) for name, values in medians.items()}
    return {**result, "same_lists": same / len(questions)}


def throughput(search: Callable[[list[str]], Any], questions: list[str], batch: int, clients: int) -> float:
    """Return queries per second of so many threads that send batches."""
    batches = [questions[first : first + batch] for first in range(0, len(questions), batch)]
    errors: list[Exception] = []

    def client(number: int) -> None:
        try:
            for place in range(number, len(batches), clients):
                search(batches[place])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(questions) / (time.perf_counter() - began)


@contextmanager
def served(folder: Path) -> Iterator[tuple[Retriever, int]]:
    """Start a server; give a client of it and its process id."""
    command = [sys.executable, "-m", "trace_gym.cli", "serve", "search", "--port", "0", "--backend", "embedded"]
    with subprocess.Popen([*command, "--corpus", str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().partition("listening at ")[2].partition(";")[0]
            process.stdout.readline()
            with closing(open_retriever("http", url=url)) as client:
                yield client, process.pid
        finally:
            process.kill()


def server_beside_engine(folder: Path, questions: list[str], rounds: int) -> dict[str, float]:
    """Search through a server and directly, taking turns."""
    engine = open_retriever("embedded", folder)
    ways = {
        "engine, batches": (engine, 64, 1),
        "server, batches": (None, 64, 4),
        "engine, 64 threads": (engine, 1, 64),
        "server, 64 threads": (None, 1, 64),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with served(folder) as (client, _), closing(engine):
        for _ in range(rounds):
            for name, (direct, batch, threads) in ways.items():
                search = (direct or client).search
                rates[name].append(throughput(lambda asked, search=search: search(asked, K), questions, batch, threads))
    return {name: statistics.median(values) for name, values in rates.items()}


def soak(folder: Path, questions: list[str], queries: int) -> list[float]:
    """Send so many different queries from 64 threads; return the server's memory in MB after every tenth of them."""
    words = sorted({word for question in questions for word in question.split()})
    rng = np.random.default_rng(1)
    used = []
    with served(folder) as (client, pid):
        for _ in range(10):
            asked = [" ".join(rng.choice(words, 8)) for _ in range(queries // 10)]
            throughput(lambda batch: client.search(batch, K), asked, 1, 64)
            used.append(memory("VmRSS", pid))
    return used


def has_lucene() -> str:
    """Return why Lucene cannot be measured here; empty if it can."""
    try:
        java.find_jar()
        java.find_java()
    except MissingExtraError as error:
        return str(error)
    return ""


def main() -> None:
    """Print the tables and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5,000 passages, under 50 seconds")
    parser.add_argument("--passages", type=int, help="size of the corpus (default: 100,000)")
    options = parser.parse_args()
    passages = options.passages or (5_000 if options.quick else 100_000)
    ratios: dict[str, float] = {"passages": passages}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, index, lucene = folder / "corpus.jsonl", folder / "embedded", folder / "lucene"
        questions = write_corpus(corpus, passages, 250 if options.quick else 1000)
        text_mb = corpus.stat().st_size / 2**20
        print(f"{passages:,} passages, {text_mb:.0f} MB of text, {len(questions)} questions")
        built = in_process(build_alone, "embedded", corpus, index)
        print("\nembedded index    {seconds:8.1f} s, {cpu:.1f} s of CPU, peak memory {peak_mb:.0f} MB".format(**built))
        found = in_process(search_alone, index, questions)
        print("embedded search   p50 {p50:.3f} ms, p99 {p99:.3f} ms, {qps:,.0f} queries/s".format(**found))
        print("embedded memory   {mb:.0f} MB beyond the text, opened in {open_s:.2f} s".format(**found))
        ratios |= {"p50_ms": found["p50"], "memory_mb": found["mb"], "index_s": built["seconds"]}

        reason = has_lucene()
        if reason:
            print(f"\nlucene            not measured: {reason}")
        else:
            built = in_process(build_alone, "pyserini", corpus, lucene)
            print("\nlucene index      {seconds:8.1f} s".format(**built))
            pair = in_process(lucene_beside_embedded, index, lucene, questions)
            for engine in ("pyserini", "lucene", "embedded"):
                print(f"{engine:18}p50 {pair[f'{engine}_p50']:.3f} ms, {pair[f'{engine}_qps']:,.0f} queries/s")
            share = open_retriever("pyserini", lucene)
            throughput(lambda batch: share.search(batch, K), questions, 1, 1)
            rate = throughput(lambda batch: share.search(batch, K), questions, 1, 1)
            share.close()
            print(f"{'backend pyserini':18}{rate:,.0f} queries/s one by one, through the pipe of its process")
            ratios["embedded_over_pyserini_qps"] = pair["embedded_qps"] / pair["pyserini_qps"]
            ratios["embedded_over_lucene_qps"] = pair["embedded_qps"] / pair["lucene_qps"]
            ratios["embedded_over_pyserini_backend_qps"] = found["qps"] / rate
            ratios["same_lists"] = pair["same_lists"]

        rates = server_beside_engine(index, questions, 2 if options.quick else 5)
        print()
        for way, rate in rates.items():
            print(f"{way:20}{rate:10,.0f} queries/s")
        ratios["server_over_engine_batches"] = rates["server, batches"] / rates["engine, batches"]
        ratios["server_over_engine_64_threads"] = rates["server, 64 threads"] / rates["engine, 64 threads"]
        if not options.quick:
            used = soak(index, questions, 100_000)
            print("\nmemory of the server after every 10,000 queries, MB: " + ", ".join(f"{mb:.0f}" for mb in used))
            ratios["memory_growth_mb"] = used[-1] - used[0]
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
