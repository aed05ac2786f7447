"""Multi-turn mathematics with a stateful Python tool."""

from trace_gym.envs.math.grading import Verdict, grade
from trace_gym.envs.math.python_tool import PythonTool

__all__ = ["PythonTool", "Verdict", "grade"]
