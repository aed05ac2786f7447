"""The scripted demonstrator: it plays the ground truth, with slips.

The demonstrator knows the calls of the turn and makes them one by one, or a few in a step where there are more than
steps are allowed; once all are made it says so, which ends the turn. With a skill below 1 each step goes wrong with
probability ``1 - skill``: it ends the turn too early, makes a call with a wrong argument, calls another function, or
calls one that does not exist. Wherever the ground truth was left it is taken up again, so that a slip which changes
nothing is made good and one that changes something is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from trace_gym.chat import parse_tool_calls, render_tool_call
from trace_gym.envs.bfcl.tasks import BFCLTask
from trace_gym.envs.bfcl.tools import Offer, get_offer
from trace_gym.messages import ToolCall

STEPS = 20  # in which a turn has to be done
EARLY_SHARE = 0.25  # of the slips while there is something to do
DONE, UNABLE = "Done.", "I cannot do this with what I have."


def next_action(
    task: BFCLTask,
    turn: int,
    made: Sequence[Sequence[ToolCall]],
    tool_format: str,
    offer: Offer,
    rng: np.random.Generator,
    skill: float,
) -> str:
    """Return the demonstrator's next action.

    Args:
        task: The task.
        turn: Turn of the user, from 0.
        made: The calls of each step of this turn so far.
        tool_format: How calls are written.
        offer: The functions on offer.
        rng: Draws the slips.
        skill: Share of right steps, in [0, 1].
    """
    calls = truth_calls(task)[turn]
    left = calls[_position(calls, [call for step in made for call in step]) :]
    is_wrong = rng.random() >= skill
    if is_wrong and left and rng.random() < EARLY_SHARE:
        return DONE
    if is_wrong:
        left = (_slip(left[0] if left else None, offer, rng),)
    elif not left:
        return DONE if calls else UNABLE
    num_together = 1 if is_wrong else -(-len(calls) // STEPS)
    return "\n".join(render_tool_call(call, tool_format, offer.tools) for call in left[:num_together])


@lru_cache(maxsize=1024)
def truth_calls(task: BFCLTask) -> tuple[tuple[ToolCall, ...], ...]:
    """Return the calls of each turn of the ground truth, every argument with its name."""
    tools = get_offer(task, len(task.turns), "compact").tools
    return tuple(
        tuple(call for text in calls for call in parse_tool_calls(f"[{text}]", "pythonic", tools).calls)
        for calls in task.ground_truth
    )


def _position(calls: Sequence[ToolCall], made: Sequence[ToolCall]) -> int:
    """Return how many of the calls were made, in this order."""
    position = 0
    for call in made:
        position += position < len(calls) and call == calls[position]
    return position


def _slip(call: ToolCall | None, offer: Offer, rng: np.random.Generator) -> ToolCall:
    """Return a call that is wrong: another value, another function, or a function that does not exist."""
    kind = int(rng.integers(3))
    if call is not None and call.arguments and kind == 0:
        name = sorted(call.arguments)[int(rng.integers(len(call.arguments)))]
        return ToolCall(call.name, {**call.arguments, name: _other(call.arguments[name])})
    if kind == 1 and call is not None:
        return ToolCall(f"{call.name}_all", call.arguments)
    name = offer.names[int(rng.integers(len(offer.names)))]
    return ToolCall(name, _arguments(offer, name))


def _other(value: Any) -> Any:
    """Return a value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}_2" if value else "x"
    return type(value)()


def _arguments(offer: Offer, name: str) -> dict[str, Any]:
    """Return a value for each argument that a function needs."""
    tool: Mapping[str, Any] = next(tool["function"] for tool in offer.tools if tool["function"]["name"] == name)
    plain = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    needed = tool["parameters"].get("required", ())
    return {n: plain.get(tool["parameters"]["properties"][n]["type"], "x") for n in needed}
