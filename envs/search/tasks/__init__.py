"""Questions for a search tool: bundled ones made from facts, and those of the usual data sets."""

from trace_gym.envs.search.tasks.named import (
    NAMED,
    SUITES,
    Data,
    bundled_questions,
    context_corpus,
    load_questions,
)
from trace_gym.envs.search.tasks.question import Question, QuestionTable, side_of

__all__ = [
    "NAMED",
    "SUITES",
    "Data",
    "Question",
    "QuestionTable",
    "bundled_questions",
    "context_corpus",
    "load_questions",
    "side_of",
]
