"""A stateful Python tool whose every state can be kept, branched and restored."""

from trace_gym.envs.math.python_tool.capabilities import Capabilities, capabilities
from trace_gym.envs.math.python_tool.choice import BACKENDS, choose_backend, snapshot_kind
from trace_gym.envs.math.python_tool.history import CellResult
from trace_gym.envs.math.python_tool.lease import ToolLease, shared_tool
from trace_gym.envs.math.python_tool.state import State
from trace_gym.envs.math.python_tool.tool import PythonTool

__all__ = [
    "BACKENDS",
    "Capabilities",
    "CellResult",
    "PythonTool",
    "State",
    "ToolLease",
    "capabilities",
    "choose_backend",
    "shared_tool",
    "snapshot_kind",
]
