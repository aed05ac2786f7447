"""Training a policy on rollout trees with TRL.

The names below load torch, transformers and TRL only when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trace_gym.errors import require

if TYPE_CHECKING:
    from trace_gym.training.config import TraceGRPOConfig
    from trace_gym.training.trainer import TraceGRPOTrainer

__all__ = ["TraceGRPOConfig", "TraceGRPOTrainer"]

_HOMES = {"TraceGRPOConfig": "config", "TraceGRPOTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    """Load a name's module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("trl", "train")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
