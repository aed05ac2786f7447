"""Workers of systems that cannot fork: fresh Python processes, told to start before they are needed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from trace_gym.envs.math.grading.clock import Deadline, DeadlineError, GradeClock, WorkerDiedError
from trace_gym.envs.math.python_tool.prelude import CLEAN_ENVIRONMENT

_KEPT = ("SYSTEMROOT", "TEMP", "TMP")  # without these Python does not start on Windows


class PipedWorker:
    """A process that reads a line and answers it with a line or two; it may still be starting."""

    def __init__(self) -> None:
        """Start it without waiting for it."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        script = str(Path(__file__).with_name("boot.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", script, "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**CLEAN_ENVIRONMENT, **kept},
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_met = False
        threading.Thread(target=self._read, daemon=True, name="grader worker").start()

    def _read(self) -> None:
        output = self._process.stdout
        if output is not None:
            with contextlib.suppress(ValueError, OSError):
                for line in output:
                    self._lines.put(line)
        self._lines.put("")

    def meet(self, limit: Deadline) -> None:
        """Wait until it is there.

        Raises:
            DeadlineError: If it is not there in time; it may yet come.
            WorkerDiedError: If it does not come.
        """
        if not self._is_met:
            self._next(limit.left())
            self._is_met = True

    def clock(self, limit: Deadline) -> GradeClock:
        """Return the clock of one comparison, started now."""
        return GradeClock(self._process.pid, limit)

    def send(self, message: dict[str, Any], _: GradeClock) -> None:
        """Send a request."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise WorkerDiedError(str(error)) from error

    def receive(self, clock: GradeClock) -> dict[str, Any]:
        """Return the next message.

        Raises:
            DeadlineError: If the clock ran out.
            WorkerDiedError: If the worker is gone.
        """
        while True:
            left = clock.left()
            try:
                return self._next(left)
            except DeadlineError:
                continue  # the clock knows whether there is more time

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise DeadlineError from error
        if not line:
            raise WorkerDiedError("it is gone")
        return dict(json.loads(line))

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's ends of the pipes; the worker leaves when its input is closed everywhere."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Starter:
    """Starts workers one by one."""

    is_alive = True

    def start(self) -> PipedWorker:
        """Start a worker without waiting for it."""
        return PipedWorker()

    def close(self) -> None:
        """Do nothing: workers are ended one by one."""

    def abandon(self) -> None:
        """Do nothing."""
