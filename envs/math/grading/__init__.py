"""Grading of mathematical answers: exact, bounded, and three-valued."""

from trace_gym.envs.math.grading.grader import Verdict, extract_answer, grade

__all__ = ["Verdict", "extract_answer", "grade"]
