"""What holds for every test module: it leaves no process behind."""

import gc
import os
import sys
import time
from pathlib import Path

import pytest


def children():
    """Return the pids of this process's children (none where there is no /proc)."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.fixture(scope="session")
def bfcl_wheel():
    """The simulators of BFCL. Without them tests are skipped, in CI they fail."""
    from trace_gym.envs.bfcl.backend import load_backend
    from trace_gym.errors import InfrastructureError, MissingExtraError

    try:
        return load_backend()
    except (InfrastructureError, MissingExtraError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind():
    """An environment that a test forgot to close keeps its sandbox running."""
    before = children()
    yield
    gc.collect()
    if grading := sys.modules.get("trace_gym.envs.math.grading"):
        grading.close_grader()  # outside of environments the workers live until the program ends
    deadline = time.monotonic() + 10
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {sorted(left)}"
