"""A stateful Python tool whose every state can be kept, branched and restored."""

from trace_gym.envs.math.python_tool.history import CellResult
from trace_gym.envs.math.python_tool.lease import ToolLease, shared_tool
from trace_gym.envs.math.python_tool.tool import PythonTool, State

__all__ = ["CellResult", "PythonTool", "State", "ToolLease", "shared_tool"]
