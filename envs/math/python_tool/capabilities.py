"""What this machine can do to confine the code of a model, found out by doing it in a process that ends at once."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trace_gym.envs.math.python_tool.prelude import CLEAN_ENVIRONMENT
from trace_gym.errors import InfrastructureError

Isolation = Literal["full", "seccomp", "rlimits", "none"]

_PROBE_S = 60.0


@dataclass(frozen=True)
class Capabilities:
    """What the kernel and this user's rights give.

    Attributes:
        platform: As `sys.platform` says it.
        architecture: As `platform.machine` says it.
        landlock_abi: Version of Landlock, 0 for none: which files may be read, and that none may be written.
        seccomp: Whether system calls are filtered: no network, no signals, no new programs, no threads.
        fork_control: Whether a process forks by permission only (seccomp user notification).
        own_uid: Whether each session gets a user id of its own; needs root.
        isolation: ``full``; ``seccomp`` (all but Landlock: a cell writes no file, but reads what this user may read);
            ``rlimits`` (limits of memory, time and file size, and of the rest what there is); ``none``.
        backends: The backends of `PythonTool` that can run here.
    """

    platform: str
    architecture: str
    landlock_abi: int
    seccomp: bool
    fork_control: bool
    own_uid: bool
    isolation: Isolation
    backends: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What would be needed for full isolation, one phrase each."""
        return tuple(self._lacks())

    def _lacks(self) -> Iterator[str]:
        if self.platform != "linux":
            yield "Linux"
            return
        if not self.seccomp:
            yield "seccomp on x86_64 or aarch64"
        elif not self.fork_control:
            yield "seccomp user notification (Linux 5.5, and no other listener above this process)"
        if not self.landlock_abi:
            yield "Landlock (Linux 5.13, switched on)"

    def __str__(self) -> str:
        """Describe it in a few lines."""
        rows = [
            ("files by Landlock", f"version {self.landlock_abi}" if self.landlock_abi else "no"),
            ("system calls by seccomp", _yes(self.seccomp)),
            ("forks by permission", _yes(self.fork_control)),
            ("user id per session", _yes(self.own_uid)),
            ("backends", ", ".join(self.backends)),
        ]
        if self.missing:
            rows.append(("missing", "; ".join(self.missing)))
        lines = [f"isolation: {self.isolation} ({self.platform}, {self.architecture})"]
        return "\n".join(lines + [f"  {name + ':':<25}{value}" for name, value in rows])


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def capabilities() -> Capabilities:
    """Return what this machine gives; the first call starts a short-lived process.

    Raises:
        InfrastructureError: With kind ``sandbox_start``, if that process fails.
    """
    return _capabilities(os.geteuid() if hasattr(os, "geteuid") else -1)


@functools.cache
def _capabilities(_: int) -> Capabilities:
    layers = _probe() if sys.platform == "linux" else {}
    landlock_abi = int(layers.get("landlock_abi", 0))
    seccomp, fork_control = bool(layers.get("seccomp")), bool(layers.get("fork_control"))
    isolation: Isolation = "none"
    if sys.platform == "linux":
        isolation = "rlimits"
        if seccomp and fork_control:
            isolation = "full" if landlock_abi else "seccomp"
    backends = ["fork"] if layers.get("pidfd") else []
    backends.append("replay")
    if importlib.util.find_spec("pydantic_monty") is not None:
        backends.append("monty")
    return Capabilities(
        platform=sys.platform,
        architecture=platform.machine(),
        landlock_abi=landlock_abi,
        seccomp=seccomp,
        fork_control=fork_control,
        own_uid=bool(layers.get("own_uid")),
        isolation=isolation,
        backends=tuple(backends),
    )


def _probe() -> dict[str, int | bool]:
    """Have a process confine itself and say how far that went."""
    command = [sys.executable, "-s", "-P", str(Path(__file__).with_name("boot.py")), "probe"]
    run = subprocess.run(
        command, env=CLEAN_ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S
    )
    if run.returncode < 0:  # whoever confines this process kills for what we tried: nothing is sure
        return {}
    if run.returncode:
        reason = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InfrastructureError("sandbox_start", f"the confinement of this machine could not be tried out: {reason}")
    layers: dict[str, int | bool] = json.loads(run.stdout)
    return layers
