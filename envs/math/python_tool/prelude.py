"""What every process that runs model code does before the first cell; on every system.

Imports only the standard library at first, and nothing that some system lacks.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from typing import Any

PRELOADED = "collections decimal fractions functools heapq itertools math operator statistics string"

# Everything such a process may know of its surroundings. BLAS threads would not survive a fork.
CLEAN_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def seed(value: int) -> None:
    """Seed the global random generators."""
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value % 2**32)


def warm() -> None:
    """Load what mathematics needs, and let lazy parts of it load too, once for all sessions."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.linalg.solve(np.eye(2), np.ones(2))
        generator = np.random.default_rng

        def default_rng(seed: Any = None) -> Any:
            # Without a seed it would differ between clones and break every replay.
            return generator(random.getrandbits(64) if seed is None else seed)

        np.random.default_rng = default_rng
    with contextlib.suppress(ImportError):
        import sympy

        x = sympy.Symbol("x")
        sympy.integrate(x * sympy.sin(x), x)
        sympy.solve(x**2 - 2, x)
    sys.argv = [""]
