"""The driver's side of the process with the Java virtual machine: requests with deadlines over its pipes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

from trace_gym.envs.search.retrieval.base import KIND
from trace_gym.envs.search.retrieval.java import find_jar, find_java
from trace_gym.errors import InfrastructureError, unknown_name


class ChildLostError(Exception):
    """The process ended or missed a deadline; the message says how."""


class JvmChild:
    """One life of the process.

    Args:
        index: Folder of a Lucene index.
        k1: Parameter of BM25.
        b: Parameter of BM25.
        heap_gb: Most memory for Java's heap.
        timeout_s: Deadline of the start.

    Attributes:
        size: Number of documents.
        pid: Id of the process.
    """

    def __init__(self, index: Path, k1: float, b: float, heap_gb: float, timeout_s: float) -> None:
        """Start the process and wait until the index is open.

        Raises:
            MissingExtraError: If there is no Java or no Pyserini.
            ChildLostError: If it did not come up.
        """
        options = {**jvm_options(heap_gb), "index": str(index), "k1": k1, "b": b}
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            _command(options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C at the terminal is not for it
        )
        self.pid = self._process.pid
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {0: Future()}
        self._lock = threading.Lock()
        self._stopping = threading.Lock()
        self._ended = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Threads, so that neither a full pipe nor a silent process can hold up a caller beyond the deadline.
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()
        try:
            self.size = int(self._await(0, self._waiting[0], timeout_s)["size"])
        except BaseException:
            self.stop()
            raise

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            ChildLostError: If the process ended, or did not answer in time.
        """
        number = next(self._numbers)
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended:
                raise ChildLostError(self._reason())
            self._waiting[number] = future
        self._outbox.put(json.dumps({"id": number, **request}).encode() + b"\n")
        return self._await(number, future, timeout_s)

    def _await(self, number: int, future: Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise ChildLostError(f"no answer within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while (data := self._outbox.get()) is not None:
                pipe.write(data)
                pipe.flush()
        except (OSError, ValueError):  # it is gone; the reader tells who waits
            pass

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        for line in pipe:
            try:
                answer = json.loads(line)
            except ValueError:  # cut off by the end
                break
            with self._lock:
                future = self._waiting.get(answer["id"])
            if future is not None:
                future.set_result(answer)
        self._process.wait()
        with self._lock:
            self._ended = True
            waiting = list(self._waiting.values())
        for future in waiting:
            if not future.done():
                future.set_exception(ChildLostError(self._reason()))

    def _reason(self) -> str:
        try:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2000))
            last = self._log.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        except (OSError, ValueError):
            last = ""
        code = self._process.returncode
        return f"it ended with code {code}" + (f": {last[:300]}" if last else "")

    def stop(self) -> None:
        """End the process and close its pipes; doing so again, or in several threads at once, does nothing more."""
        with self._stopping:
            self._outbox.put(None)
            self._process.kill()
            for thread in self._threads:
                thread.join()
            self._process.wait()
            for file in (self._process.stdin, self._process.stdout, self._log):
                with contextlib.suppress(OSError):  # a request that was never read
                    if file is not None:
                        file.close()


def prebuilt_index(name: str, say: Callable[[str], None]) -> Path:
    """Return the folder of one of Pyserini's prebuilt indexes; download it unless it is there.

    Raises:
        BadInputError: If there is no such index; the nearest name is shown.
        InfrastructureError: If the catalogue cannot be read or the index cannot be downloaded.
    """
    command = _command({**jvm_options(1.0), "prebuilt": name})
    answer: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:  # progress is shown
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "bytes" in answer:
                    say(f"downloading {name} ({answer['bytes'] / 1e9:.1f} GB compressed) into {answer['folder']}")
        except BaseException:
            process.kill()
            raise
    if "unknown" in answer:
        raise unknown_name("prebuilt index", name, answer["unknown"])
    if "index" not in answer:
        reason = answer.get("error", f"the process ended with code {process.returncode}")
        raise InfrastructureError(KIND, f"cannot get the prebuilt index {name}: {reason}")
    return Path(answer["index"])


def _command(options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-P", str(Path(__file__).with_name("jvm_child.py")), json.dumps(options)]


def jvm_options(heap_gb: float) -> dict[str, Any]:
    """Return how the child starts Java."""
    jar, java = find_jar(), find_java()
    jvm = [f"-Xmx{int(heap_gb * 1024)}m", "-Xrs"]  # with -Xrs signals are left to Python
    if java.version > 21:
        jvm.append("--enable-native-access=ALL-UNNAMED")
    if "jdk.incubator.vector" in java.modules:
        jvm.append("--add-modules=jdk.incubator.vector")
    return {"java_home": str(java.home), "jar": str(jar), "jvm": jvm, "parent": os.getpid()}
