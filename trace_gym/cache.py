"""Where things are kept that can be made or fetched again: policies, indexes, wheels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str | None = None) -> Path:
    """Return the per-user cache folder; the environment variables ``TRACE_GYM_CACHE`` and ``XDG_CACHE_HOME`` move it.

    Args:
        kind: Folder inside it, for one kind of things; None returns the whole.
    """
    base = os.environ.get("TRACE_GYM_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) / "trace_gym" if base else Path.home() / ".cache" / "trace_gym"
    return folder / kind if kind else folder
