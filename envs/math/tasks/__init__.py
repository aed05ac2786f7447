"""Mathematical problems: generated from a seed, or loaded from files."""

from trace_gym.envs.math.tasks.families import FAMILIES, Step
from trace_gym.envs.math.tasks.task_sets import (
    DIFFICULTIES,
    SPLITS,
    Task,
    TaskSet,
    TaskTable,
    load_tasks,
    make_task,
    split_of,
)

__all__ = [
    "DIFFICULTIES",
    "FAMILIES",
    "SPLITS",
    "Step",
    "Task",
    "TaskSet",
    "TaskTable",
    "load_tasks",
    "make_task",
    "split_of",
]
