"""trace_gym: multi-turn tasks that can be cloned at any turn, and the trainer that spends rollouts where they teach.

>>> import gymnasium
>>> import trace_gym
>>> env = gymnasium.make("trace_gym/MathCode-v0")

Importing this package registers the environments by name only; no environment and no torch is imported.
"""

import gymnasium

from trace_gym.chat import parse_tool_calls, render_tool_call
from trace_gym.check import Law, check_snapshot
from trace_gym.errors import (
    BadInputError,
    InfrastructureError,
    MissingExtraError,
    ReplayDivergenceError,
    StateError,
    TraceGymError,
)
from trace_gym.messages import Completion, Message, Request, ToolCall
from trace_gym.snapshot import EnvState, clone, load_state, save_state

__version__ = "0.1.0"

__all__ = [
    "ENVS",
    "BadInputError",
    "Completion",
    "EnvState",
    "InfrastructureError",
    "Law",
    "Message",
    "MissingExtraError",
    "ReplayDivergenceError",
    "Request",
    "StateError",
    "ToolCall",
    "TraceGymError",
    "check_snapshot",
    "clone",
    "load_state",
    "parse_tool_calls",
    "render_tool_call",
    "save_state",
]

# Entry points are strings: registering them imports no environment.
ENVS = {
    "trace_gym/MathCode-v0": "trace_gym.envs.math.env:MathCodeEnv",
    "trace_gym/HotpotQASearch-v0": "trace_gym.envs.search.env:HotpotQASearchEnv",
    "trace_gym/BFCLMultiTurn-v0": "trace_gym.envs.bfcl.env:BFCLMultiTurnEnv",
}

for _id, _entry_point in ENVS.items():
    gymnasium.register(id=_id, entry_point=_entry_point)
gymnasium.register(id="trace_gym/Mixture-v0", entry_point="trace_gym.mixture:MixtureEnv")  # of those above, or others
