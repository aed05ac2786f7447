"""The process of one session of the replay backend: runs cells one after the other, on any system.

It reads requests from standard input and answers on standard output: ``seed {id, seed}`` and ``run {id, code, number,
seed?}``, each answered with ``{id, status}``. What cells print goes into a file that it shares with the driver, so what
was printed survives the death of the process. It ends when its standard input closes. Nothing in this file is a secret
or a boundary: model code shares the interpreter with it.

Started by boot.py in a clean environment, like the zygote of the fork backend, which does the same by other means.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trace_gym.envs.math.python_tool import frames, prelude
from trace_gym.envs.math.python_tool.interpreter import Interpreter

if sys.platform == "linux":  # here, as boot.py hides this package from what is imported later
    from trace_gym.envs.math.python_tool import confine


def main(argv: list[str]) -> NoReturn:
    """Warm up, say hello and serve.

    Args:
        argv: The path of the shared file, the driver's pid, and as JSON the limits ``memory_mb``, ``output_chars``,
            ``max_processes``, and ``confine``: whether the kernel is to confine this process.
    """
    limits = json.loads(argv[2])
    memory = os.open(argv[0], os.O_RDWR | getattr(os, "O_BINARY", 0))
    requests, replies = _take_over_the_pipes()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prelude.warm()
    waiting: Iterable[dict[str, Any]]
    waiting = frames.read_all(requests) if limits["confine"] else _read_beside(requests)
    _blind((2,))  # until here, what goes wrong is seen by people
    try:
        is_isolated = _confine(limits, int(argv[1])) if limits["confine"] else _limit(limits)
        interpreter = Interpreter(2 * limits["output_chars"])
        frames.write(replies, {"isolated": is_isolated})
    except OSError as error:
        frames.write(replies, {"error": f"a session could not be confined: {error}"})
        os._exit(1)
    try:
        for request in waiting:
            frames.write(replies, {"id": request["id"], "status": _answer(request, interpreter, memory)})
    except BaseException:  # the session's own machinery is damaged; there is no way on
        os._exit(4)
    os._exit(0)


def _answer(request: dict[str, Any], interpreter: Interpreter, memory: int) -> str:
    if "seed" in request:
        prelude.seed(request["seed"])
    if request["op"] == "seed":
        return "ok"
    return interpreter.run(request["code"], request["number"], os.dup(memory))


def _take_over_the_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep both pipes for the frames, and leave cells the null device in their place."""
    requests = open(os.dup(0), "rb", buffering=0)  # noqa: PTH123 - descriptors
    replies = open(os.dup(1), "wb", buffering=0)  # noqa: PTH123
    _blind((0, 1))
    return requests, replies


def _blind(descriptors: Iterable[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in descriptors:
        os.dup2(null, fd)
    os.close(null)


def _confine(limits: dict[str, Any], driver: int) -> bool:
    """Let the kernel confine this process like a session of the fork backend; it can never fork."""
    with contextlib.suppress(OSError):  # if memory runs out, it goes first
        Path("/proc/self/oom_score_adj").write_text("800")
    domain = confine.Domain(limits, Path(__file__).resolve().parents[3])
    listener = domain.listen()
    if listener is not None:
        os.close(listener)  # nobody will permit a fork
    domain.enter(driver)
    return domain.has_filter and domain.has_listener


def _limit(limits: dict[str, Any]) -> bool:
    """Limit memory and files, as far as the system has such limits; that isolates nothing."""
    memory = limits["memory_mb"] << 20
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    return False


def _read_beside(requests: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the requests as a thread reads them, which ends the process at once when the driver is gone."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def pump() -> None:
        for request in frames.read_all(requests):
            waiting.put(request)
        os._exit(0)

    threading.Thread(target=pump, daemon=True).start()
    return iter(waiting.get, None)
