"""BFCLMultiTurn: do what a user asks over several turns by calling the functions of simulated services."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trace_gym.chat import CallError, ParsedCalls, get_tool_format
from trace_gym.envs.bfcl.backend import load_backend
from trace_gym.envs.bfcl.checker import check_turn
from trace_gym.envs.bfcl.demonstrator import next_action
from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.tasks import BFCLTask, TaskTable, load_tasks
from trace_gym.envs.bfcl.tools import TOOL_DOCS, Offer, get_offer
from trace_gym.envs.text_env import Episode, TurnResult, changed, printable
from trace_gym.envs.value_env import ValueEnv
from trace_gym.errors import BadInputError, StateError, unknown_name
from trace_gym.messages import Message, ToolCall
from trace_gym.snapshot import EnvState

SYSTEM_PROMPT = (
    "Do what the user asks by calling functions. Go on calling until everything asked for in this turn is done; then "
    "answer without a call, which ends the turn. If no function can do it, or something needed for a call was not "
    "said, say so instead of calling."
)
# What upstream has the user say when functions are added, word for word.
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"

TOOL_FORMATS = ("hermes", "llama_json", "pythonic")
MAX_CALLS = 64  # of one step; ground truths have up to 34
MAX_STEPS = 20  # steps with calls in one turn of the user; one more is still run, and ends the episode
MAX_ANNOUNCED = 32  # lists of tools of which an environment keeps a copy; the base tasks have 20
FORCED = "multi_turn:force_terminated"
SCHEMA = 1

Log = tuple[tuple[tuple[ToolCall, ...], ...], ...]


@dataclass(frozen=True)
class World:
    """The simulators of an episode and what was found out so far.

    Attributes:
        instances: The simulators, as `Instances.dumps` writes them.
        turn: Turn of the user, from 0; as many as the task has once the last is over.
        steps: Steps of the agent in this turn.
        log: For each turn of the user, this one included, the calls of each step, in order.
        valid: For each turn that is over, whether it passed its check; a turn without one passed.
        error_type: Upstream's name for why the first turn failed that did; None if none did.
        end_reason: Why a turn of the user ended with the agent's last action: ``"no_call"``, ``"parse_error"`` or
            ``"forced"``; None if none ended.
    """

    instances: bytes
    turn: int = 0
    steps: int = 0
    log: Log = ((),)
    valid: tuple[bool, ...] = ()
    error_type: str | None = None
    end_reason: str | None = None


class BFCLMultiTurnEnv(ValueEnv):
    """Do what a user asks, turn by turn, with the functions of file systems, cars, brokers, travel agencies and more.

    ## Description
    The 800 multi-turn tasks of the Berkeley Function-Calling Leaderboard, version 4: 200 scenarios in four variants.
    In each turn the user asks for something; the agent calls functions, one or several in a step, until it answers
    without a call, which ends the turn. Tasks and simulators come from a pinned wheel that is fetched on first use
    (``trace-gym data bfcl``). No text of an agent is ever evaluated. Every prefix of an episode can be saved and
    cloned.

    ## Action Space
    Any text, the agent's whole step. The calls in it, written in the ``tool_format``, are run in order, at most 64.

    ## Observation Space
    The results of the calls, or what the user says next.

    ## Rewards
    0.0 until the end, then 1.0 if every turn passed upstream's check, else 0.0. A turn passes if at its end the
    simulators' state equals that of the ground truth, and what the ground truth's calls answered was answered to the
    agent in this or an earlier turn. A turn in which the ground truth calls nothing is not checked.

    ``info`` also has ``turn_valid`` (of each turn that is over, whether it passed), ``progress`` (of the turns that are
    checked, the share that passed), ``user_turn`` and ``num_user_turns``, ``turn_end_reason`` if the action ended the
    user's turn (``"no_call"``; ``"parse_error"``, then ``action_error`` says which; ``"forced"``), and ``error_type``
    once a turn failed: upstream's name for why. (``failure`` is the infrastructure's, as in every environment.)

    ## Starting State
    What the user says first, and the simulators as the task configures them.

    ## Episode End
    Terminated: the last turn is over, or the 21st step with calls of one turn was taken.
    Truncated: ``max_turns`` steps were taken, which upstream's rules alone never allow.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | `subset` | `"base"` | `"base"`, `"long_context"`, `"miss_func"`, `"miss_param"` or `"all"` |
    | `split` | `"train"` | `"train"` (160 scenarios), `"eval"` (40) or `"all"` |
    | `exclude_suspect` | False | leave out scenarios whose ground truth nobody can know |
    | `enforce_tools` | True | a function that is not on offer yet does not run; upstream runs it |
    | `official_last_turn_quirk` | False | check a last turn that was cut off, as upstream; else it fails |
    | `terminate_on_fail` | False | end the episode with the first turn that fails |
    | `retry_unreadable` | False | an unreadable call is answered with what is wrong; upstream ends the turn |
    | `tool_doc` | `"official"` | the functions' documents as upstream gives them; `"compact"`: half as long |
    | `max_turns`, `tool_format`, … | 200, `"hermes"` | see `TextEnv`; formats: hermes, llama_json, pythonic |

    In the format hermes there is no system message, as upstream, and chat templates announce the tools. In the others
    it says what to do and what there is. Functions that are added later stand in the user's message of that turn, in
    every format: what a model has read is never rendered anew.

    ## Version History
    * v0: initial version.
    """

    def __init__(
        self,
        subset: str = "base",
        split: str = "train",
        exclude_suspect: bool = False,
        enforce_tools: bool = True,
        official_last_turn_quirk: bool = False,
        terminate_on_fail: bool = False,
        retry_unreadable: bool = False,
        tool_doc: str = "official",
        max_turns: int = 200,
        **base: Any,
    ) -> None:
        """Load the tasks; fetches the wheel if it was never used before."""
        # Unreadable actions end turns of the user, and with them the episode; they need no limit of their own.
        options = {"max_bad_actions": max_turns, "max_action_chars": 65_536, "max_observation_chars": 2**21} | base
        super().__init__(max_turns=max_turns, **options)
        if self.tool_format not in TOOL_FORMATS:
            raise unknown_name("tool format", self.tool_format, TOOL_FORMATS)
        if tool_doc not in TOOL_DOCS:
            raise unknown_name("tool_doc", tool_doc, TOOL_DOCS)
        self.enforce_tools = enforce_tools
        self.official_last_turn_quirk = official_last_turn_quirk
        self.terminate_on_fail = terminate_on_fail
        self.retry_unreadable = retry_unreadable
        self.tool_doc = tool_doc
        self.tasks: TaskTable = load_tasks(subset, split, exclude_suspect)
        self._all_tasks: TaskTable = load_tasks()  # a state may be of a task that this environment does not draw
        # Copies of the tools, by names: what somebody does to those in an info stays with this environment.
        self._announced: dict[tuple[str, ...], list[Any]] = {}

    @property
    def task_ids(self) -> Sequence[str]:
        """Ids of the tasks on offer."""
        return self.tasks.ids

    def info(self) -> dict[str, Any]:
        """Return what `TextEnv.info` does, and what is known of the user's turns."""
        info = super().info()
        episode = self._current()
        world: World = episode.world
        truth = self._all_tasks.get(episode.task_id).ground_truth
        passed = sum(is_valid for is_valid, calls in zip(world.valid, truth, strict=False) if calls)
        info["user_turn"] = world.turn
        info["num_user_turns"] = len(truth)
        info["turn_valid"] = list(world.valid)
        info["progress"] = passed / sum(map(bool, truth))
        if world.end_reason is not None:
            info["turn_end_reason"] = world.end_reason
        if world.error_type is not None:
            info["error_type"] = world.error_type
        return info

    @property
    def status(self) -> str:
        """Return ``"open"``, ``"terminal"``, ``"truncated"`` or ``"failed"``."""
        return self._current().status

    def script(self, turn: int | None = None) -> str:
        """Return what the data set has the user say in a turn, from 0; in this one by default."""
        episode = self._current()
        return _script(self._all_tasks.get(episode.task_id), episode.world.turn if turn is None else turn)

    def rephrase(self, text: str) -> None:
        """Put other words into the user's mouth, before the agent has done anything in this turn.

        Raises:
            StateError: If the agent has already read the message, or the episode is over.
        """
        episode = self._current()
        if episode.status != "open" or episode.world.steps:
            raise StateError("The user has no word now: the agent is at work, or the episode is over.")
        said = self._user_message(self._all_tasks.get(episode.task_id), episode.world.turn, printable(text))
        self._episode = changed(episode, messages=(*episode.messages[:-1], said))

    def close(self) -> None:
        """Forget the episode."""
        self._episode = None

    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], World]:
        task = self.tasks.get(task_id)
        said = self._user_message(task, 0)
        world = World(Instances.initial(task))
        tool_format = get_tool_format(self.tool_format)
        if tool_format.is_native:
            return (said,), world
        told = tool_format.describe(self._offer(task, world).tools)
        return (Message("system", f"{SYSTEM_PROMPT}\n\n{told}"), said), world

    def _offer(self, task: BFCLTask, world: World) -> Offer:
        return get_offer(task, min(world.turn, len(task.turns) - 1), self.tool_doc, not self.enforce_tools)

    def _tools_to_announce(self, episode: Episode) -> list[Any]:
        offer = self._offer(self._all_tasks.get(episode.task_id), episode.world)
        tools = self._announced.get(offer.names)
        if tools is None:
            if len(self._announced) >= MAX_ANNOUNCED:
                self._announced.clear()
            tools = self._announced[offer.names] = offer.copy_tools()
        return list(tools)

    def _user_message(self, task: BFCLTask, turn: int, text: str | None = None) -> Message:
        new = get_offer(task, turn, self.tool_doc).new if turn in task.missed_functions else ()
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in new]
        return Message("user", "\n".join([*lines, _script(task, turn) if text is None else text]))

    def _play(self, episode: Episode, action: str) -> TurnResult:
        task = self._all_tasks.get(episode.task_id)
        world: World = episode.world
        offer = self._offer(task, world)
        parsed = get_tool_format(self.tool_format).parse(action, offer.signatures)
        if parsed.calls:
            return self._run(episode, task, offer, parsed)
        error = parsed.errors[0] if parsed.errors else None
        if error is None and parsed.is_cut:
            error = CallError("invented_result", "Results come from the functions; nothing after one of yours is read.")
        if error is None:
            return self._end_turn(episode, task, world, "no_call")
        if self.retry_unreadable:
            return self._ask_again(episode, task, error)
        return replace(self._end_turn(episode, task, world, "parse_error"), action_error=error.kind)

    def _run(self, episode: Episode, task: BFCLTask, offer: Offer, parsed: ParsedCalls) -> TurnResult:
        """Run the calls in order; what is wrong beyond them is told once."""
        world: World = episode.world
        calls = parsed.calls[:MAX_CALLS]
        instances = Instances.loads(world.instances)
        observe = get_tool_format(self.tool_format).observe
        answers, failed = [], 0
        for call in calls:
            if call.name in offer.callable_names:
                text = _showable(instances.call(call.name, call.arguments))
            else:
                text = f"Error during execution: name '{_showable(call.name[:64])}' is not defined"
            failed += text.startswith(("Error during execution: ", '{"error"'))
            answers.append(observe(printable(call.name[:64]), text))
        if len(parsed.calls) > MAX_CALLS:
            answers.append(Message("user", f"Error: Only {MAX_CALLS} calls are run in one step; the rest was not."))
        elif parsed.errors:
            answers.append(Message("user", f"Error: {parsed.errors[0].detail}"))
        log = (*world.log[:-1], (*world.log[-1], calls))
        world = changed(world, instances=instances.dumps(), steps=world.steps + 1, log=log, end_reason=None)
        result = TurnResult(tuple(answers), world, tool_calls=len(calls), tool_errors=failed)
        return result if world.steps <= MAX_STEPS else self._force(episode, task, result)

    def _ask_again(self, episode: Episode, task: BFCLTask, error: CallError) -> TurnResult:
        example = get_tool_format(self.tool_format).example
        text = f"Error: {error.detail} Call a function like this: {example}, or answer without a call."
        world = changed(episode.world, steps=episode.world.steps + 1, end_reason=None)
        result = TurnResult((Message("user", text),), world, action_error=error.kind)
        return result if world.steps <= MAX_STEPS else self._force(episode, task, result)

    def _force(self, episode: Episode, task: BFCLTask, result: TurnResult) -> TurnResult:
        """End the episode, or with upstream's quirk the last turn, after a step too many."""
        world: World = result.world
        if self.official_last_turn_quirk and world.turn == len(task.turns) - 1:
            ended = self._end_turn(episode, task, world, "forced", result.messages)
        else:
            # Upstream grades a trajectory that was cut off no further, whatever went wrong before.
            world = changed(world, valid=(*world.valid, False), error_type=FORCED, end_reason="forced")
            ended = TurnResult((), world, 0.0, {"verdict": "wrong", "reason": FORCED})
        return replace(
            ended,
            messages=result.messages,
            action_error=result.action_error,
            tool_calls=result.tool_calls,
            tool_errors=result.tool_errors,
        )

    def _end_turn(
        self, episode: Episode, task: BFCLTask, world: World, reason: str, shown: tuple[Message, ...] = ()
    ) -> TurnResult:
        """Check the turn; go on to the next, or decide the task."""
        results = [message.content for message in (*episode.messages, *shown) if message.role == "tool"]
        wrong = check_turn(world.instances, task, world.turn, results, bool(world.log[-1]))
        world = changed(
            world,
            turn=world.turn + 1,
            steps=0,
            log=(*world.log, ()),
            valid=(*world.valid, wrong is None),
            error_type=world.error_type or wrong,
            end_reason=reason,
        )
        if world.turn < len(task.turns) and not (self.terminate_on_fail and wrong):
            return TurnResult((self._user_message(task, world.turn),), world)
        if world.error_type is None:
            return TurnResult((), world, 1.0, {"verdict": "correct", "reason": "every turn passed"})
        return TurnResult((), world, 0.0, {"verdict": "wrong", "reason": world.error_type})

    def _demonstrate(self, episode: Episode, rng: np.random.Generator, skill: float) -> str:
        """Play the ground truth, see `trace_gym.envs.bfcl.demonstrator`."""
        world: World = episode.world
        task = self._all_tasks.get(episode.task_id)
        return next_action(task, world.turn, world.log[-1], self.tool_format, self._offer(task, world), rng, skill)

    # State.

    def _read(self, state: EnvState, reseed: int | None) -> tuple[Episode, np.random.Generator]:
        episode, rng = super()._read(state, reseed)
        if state.live is None:
            self._check_restored(episode)
        return episode, rng

    def _check_restored(self, episode: Episode) -> None:
        """Raise unless a state from a file fits its task."""
        world: World = episode.world
        try:
            task = self._all_tasks.get(episode.task_id)
        except BadInputError as error:
            raise StateError(f"The state is of another task: {error}") from error
        classes = Instances.loads(world.instances).by_class
        if tuple(classes) != task.involved_classes or not 0 <= world.turn <= len(task.turns):
            raise StateError(f"The state does not fit the task {task.id}: it has {', '.join(classes)} in {world.turn}.")

    @staticmethod
    def _dump_world(world: World) -> Any:
        return [
            SCHEMA,
            load_backend().fingerprint,
            list(sys.version_info[:2]),  # the last digit of a number may differ between versions
            world.turn,
            world.steps,
            [[[[call.name, dict(call.arguments)] for call in step] for step in steps] for steps in world.log],
            list(world.valid),
            world.error_type,
            world.end_reason,
            Instances.loads(world.instances).to_graph(),
        ]

    def _load_world(self, data: Any, live: Any, reseed: int | None) -> World:
        schema, fingerprint, _, turn, steps, log, valid, error_type, end_reason, graph = data
        if [schema, fingerprint] != [SCHEMA, load_backend().fingerprint]:
            raise StateError(
                f"The state was saved with schema {schema} and simulators {fingerprint}; here they are {SCHEMA} and "
                f"{load_backend().fingerprint}."
            )
        read_log = tuple(tuple(tuple(ToolCall(name, args) for name, args in step) for step in steps) for steps in log)
        instances = Instances.from_graph(graph).dumps()
        return World(instances, int(turn), int(steps), read_log, tuple(valid), error_type, end_reason)

    def _twin(self) -> BFCLMultiTurnEnv:
        twin = object.__new__(BFCLMultiTurnEnv)
        twin.__dict__.update(self.__dict__)
        twin.timings = {}
        twin._episode = None
        twin._announced = {}
        return twin


def _script(task: BFCLTask, turn: int) -> str:
    return (task.turns[turn] if turn < len(task.turns) else "") or MORE_FUNCTIONS


def _showable(text: str) -> str:
    """Return a text that can be encoded; what cannot be is spelled out, so that different texts stay different."""
    return text.encode(errors="backslashreplace").decode()
