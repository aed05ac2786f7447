"""The official check of a turn, as soon as the turn ends.

A task is won if every turn passes. Upstream plays a whole trajectory again and then compares; the rules are the same,
in the same order. Two things differ, both by intent: the agent's simulators share nothing with those of the ground
truth, and a state that contains itself is a mismatch instead of an exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.gold import gold
from trace_gym.envs.bfcl.tasks import BFCLTask

EMPTY_TURN = "multi_turn:empty_turn_model_response"
STATE_MISMATCH = "multi_turn:instance_state_mismatch"
RESPONSE_MISMATCH = "multi_turn:execution_response_mismatch"

_ABSENT = object()


def check_turn(
    state: Instances | bytes, task: BFCLTask, turn: int, results_so_far: Sequence[str], calls_made: bool
) -> str | None:
    """Return why a turn fails, by the name that upstream gives it, or None if it passes.

    Args:
        state: The simulators at the end of the turn, or what `Instances.dumps` wrote of them, which may save reading
            them: most often the bytes are those of the ground truth.
        task: The task.
        turn: Its number, from 0.
        results_so_far: The texts of all calls of this and earlier turns.
        calls_made: Whether a call was made in this turn.
    """
    if not task.ground_truth[turn]:
        return None  # an abstain turn: what was done shows in the state later
    if not calls_made:
        return EMPTY_TURN
    expected = gold(task)[turn]
    if state != expected.blob:
        instances = Instances.loads(state) if isinstance(state, bytes) else state
        if not _same_state(instances, Instances.loads(expected.blob)):
            return STATE_MISMATCH
    if Counter(expected.results) - Counter(results_so_far):
        return RESPONSE_MISMATCH
    return None


def _same_state(instances: Instances, expected: Instances) -> bool:
    """Compare every public attribute that the ground truth's simulators have."""
    try:
        return all(
            vars(instances.by_class[name]).get(attribute, _ABSENT) == value
            for name, simulator in expected.by_class.items()
            for attribute, value in vars(simulator).items()
            if not attribute.startswith("_")
        )
    except (RecursionError, AttributeError):  # it contains itself; or came from a file that leaves something out
        return False
