"""Mathematical problems: generated from a seed, or loaded from files and data sets."""

from trace_gym.envs.math.tasks.families import FAMILIES, Step
from trace_gym.envs.math.tasks.named import NAMED, SUITES, Data, load_data
from trace_gym.envs.math.tasks.tables import load_tasks
from trace_gym.envs.math.tasks.task import DIFFICULTIES, Task, TaskTable
from trace_gym.envs.math.tasks.task_sets import TaskSet, make_task, split_of
from trace_gym.envs.task_table import SPLITS

__all__ = [
    "DIFFICULTIES",
    "FAMILIES",
    "NAMED",
    "SPLITS",
    "SUITES",
    "Data",
    "Step",
    "Task",
    "TaskSet",
    "TaskTable",
    "load_data",
    "load_tasks",
    "make_task",
    "split_of",
]
