"""MathCode: solve a problem with a stateful Python tool, then give the answer in a box."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from trace_gym.chat import CallError, get_tool_format, parse_tool_calls, render_tool_call
from trace_gym.envs.math.grading import GraderLease, extract_answer, grade
from trace_gym.envs.math.python_tool import State, ToolLease, choose_backend, shared_tool, snapshot_kind
from trace_gym.envs.math.tasks import Data, Task, TaskSet, TaskTable, load_data
from trace_gym.envs.text_env import Episode, TextEnv, TurnResult, printable
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Message, ToolCall

SYSTEM_PROMPT = "Solve the problem. Use the python tool; its variables persist. Give the final answer in \\boxed{}."
MAX_CALLS = 4  # per turn; what comes after is answered with one error

PYTHON_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a cell of Python. Variables persist between cells; the last expression is shown.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The cell."}},
            "required": ["code"],
        },
    },
}

_SUBSET = " It is a subset: no numpy, no sympy, no generators, no inheritance, no del."


@dataclass(frozen=True, slots=True)
class World:
    """The Python session of an episode.

    Attributes:
        session: The interpreter's state; None before the first cell, so that a reset costs no process.
        seed: Seed of the session's random generators.
        reseed: Seed to apply before the next cell, after a restore with ``reseed``.
        shown: Text of the last cell that ran without an error.
        num_good: Cells so far that ran without an error.
    """

    session: State | None
    seed: int
    reseed: int | None = None
    shown: str = ""
    num_good: int = 0


class MathCodeEnv(TextEnv):
    r"""Solve a mathematical problem in several turns with a Python tool that keeps its variables.

    ## Description
    The agent reads a problem, runs cells in a notebook-like Python session and finally answers in ``\boxed{}``. The
    bundled problems are generated: fifteen families with difficulties 1 to 5, from one line of arithmetic to searches
    that need several dependent cells. Every prefix of an episode, the session included, can be saved and cloned.

    ## Action Space
    Any text, the agent's whole turn. Calls of the tool ``python`` (argument ``code``), written in the ``tool_format``,
    are run in order, at most four a turn; a turn without a call that contains ``\boxed{…}`` is the answer (the last box
    counts). A box beside a call is not an answer: its value was not seen yet. Neither calls nor boxes count in thoughts
    or after a result that the agent made up. Anything else is answered with what is allowed.

    ## Observation Space
    The text that the cells showed, or the error.

    ## Rewards
    0.0 until the end, then 1.0 if the answer equals the gold answer, else 0.0; NaN if the infrastructure failed or
    the answer cannot be graded (``info["outcome"]`` or ``info["failure"]`` says why).

    ## Starting State
    The problem, and a Python session with nothing defined.

    ## Episode End
    Terminated: the answer was given, or ``max_bad_actions`` turns in a row could not be read.
    Truncated: ``max_turns`` were taken, or the infrastructure failed.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | `split` | None | `"train"` or `"eval"`; no question occurs in both. None: `"train"`, or all of `data` |
    | `families`, `difficulties` | all | which bundled problems |
    | `size`, `task_seed` | 1500, 0 | how many, and the seed they are generated from |
    | `data` | None | other problems in place of the bundled ones, see below |
    | `cell_timeout_s`, `memory_mb` | 5.0, 1024 | limits of one cell |
    | `backend` | `"auto"` | who runs the cells: `"fork"`, `"replay"` or `"monty"`, see `PythonTool` |
    | `allow_weak_isolation` | False | run cells where the machine cannot confine them |
    | `max_turns`, `tool_format`, … | 8, `"hermes"` | see `TextEnv` |

    `data` is the name of a data set or a suite (`trace-gym data list`), a local file (JSON Lines, JSON, CSV, Parquet;
    columns such as `question` and `answer`), `"NAME=PATH"` for a local copy of a data set, or a list of these. One
    question in five belongs to `split="eval"`; with `{"train": …, "eval": …}` each split has data of its own. The
    options of a multiple-choice question stand in the problem, and its answer is a letter. Demonstrations exist for the
    bundled problems only.

    ## Version History
    * v0: initial version.
    """

    tools: ClassVar[tuple[Mapping[str, Any], ...]] = (PYTHON_TOOL,)

    def __init__(
        self,
        split: str | None = None,
        families: Sequence[str] | None = None,
        difficulties: Sequence[int] | None = None,
        size: int = 1500,
        task_seed: int = 0,
        data: Data | None = None,
        cell_timeout_s: float = 5.0,
        memory_mb: int = 1024,
        backend: str = "auto",
        allow_weak_isolation: bool = False,
        max_turns: int = 8,
        **base: Any,
    ) -> None:
        """Generate or load the tasks; the tool starts with the first cell."""
        super().__init__(max_turns=max_turns, **base)
        self._settings: dict[str, Any] = {
            "backend": choose_backend(backend, allow_weak_isolation),
            "allow_weak_isolation": allow_weak_isolation,
            "cell_timeout_s": cell_timeout_s,
            "memory_mb": memory_mb,
        }
        self.metadata = {**self.metadata, "snapshot": snapshot_kind(self._settings["backend"])}
        if self._settings["backend"] == "monty":
            function = PYTHON_TOOL["function"]
            self.tools = ({**PYTHON_TOOL, "function": {**function, "description": function["description"] + _SUBSET}},)
        self._tool: ToolLease | None = None
        self._grader: GraderLease | None = None
        self.tasks: TaskTable
        if data is not None:
            if families is not None or difficulties is not None:
                raise BadInputError("families and difficulties choose bundled problems; leave them out with data.")
            self.tasks = load_data(data, split)
        else:
            self.tasks = _bundled(
                split or "train",
                None if families is None else tuple(families),
                None if difficulties is None else tuple(difficulties),
                size,
                task_seed,
            )

    @property
    def task_ids(self) -> Sequence[str]:
        """Ids of the tasks on offer."""
        return self.tasks.ids

    def close(self) -> None:
        """Release the session and the tool; the last environment that closes ends the tool's processes."""
        self._episode = None
        if self._tool is not None:
            tool, self._tool = self._tool, None
            tool.close()
        if self._grader is not None:
            grader, self._grader = self._grader, None
            grader.close()

    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], World]:
        task = self.tasks.get(task_id)
        self._lease_grader()
        return (Message("system", SYSTEM_PROMPT), Message("user", task.prompt)), World(None, seed)

    def _play(self, episode: Episode, action: str) -> TurnResult:
        parsed = parse_tool_calls(action, self.tool_format, self.tools)
        if parsed.calls:
            return self._run(episode.world, parsed.calls, parsed.errors)
        answer = extract_answer(parsed.said)
        if answer is not None and not parsed.errors:
            return self._grade(self.tasks.get(episode.task_id), answer, episode.world)
        if parsed.errors:
            error = parsed.errors[0]
        elif parsed.is_cut:
            error = CallError("invented_result", "Results come from the tool; nothing after one of your own is read.")
        else:
            error = CallError("no_action", "No tool call and no answer found.")
        example = get_tool_format(self.tool_format).example.replace("NAME", "python")
        text = f"Error: {error.detail} Call the tool like this: {example} or answer in \\boxed{{}}."
        return TurnResult((Message("user", text),), episode.world, action_error=error.kind)

    def _run(self, world: World, calls: Sequence[ToolCall], errors: Sequence[CallError]) -> TurnResult:
        """Run the calls in order; each is answered, but however much is wrong beyond them is answered once."""
        answers: list[Message] = []
        observe = get_tool_format(self.tool_format).observe
        failed, kinds = 0, []
        for call in calls[:MAX_CALLS]:
            problem = _refuse(call)
            if problem is not None:
                kinds.append(problem.kind)
                text, good = f"Error: {problem.detail}", False
            else:
                text, good, world = self._cell(world, call.arguments["code"])
            failed += not good
            answers.append(observe(printable(call.name[:64]), text))
        if len(calls) > MAX_CALLS:
            answers.append(Message("user", f"Error: Only {MAX_CALLS} calls are run in one turn; the rest was not."))
        elif errors:
            answers.append(Message("user", f"Error: {errors[0].detail}"))
        nothing_ran = len(kinds) == min(len(calls), MAX_CALLS)
        return TurnResult(
            tuple(answers),
            world,
            action_error=kinds[0] if nothing_ran else None,
            tool_calls=min(len(calls), MAX_CALLS),
            tool_errors=failed,
        )

    def _cell(self, world: World, code: str) -> tuple[str, bool, World]:
        before = world.session if world.session is not None else self._python().new(seed=world.seed)
        result, session = before.step(code, reseed=world.reseed)
        # A cell that was undone took the new seed with it.
        world = replace(world, session=session, reseed=world.reseed if session is before else None)
        if result.status not in ("ok", "truncated"):
            return result.text, False, world
        return result.text, True, replace(world, shown=result.text, num_good=world.num_good + 1)

    def _grade(self, task: Task, answer: str, world: World) -> TurnResult:
        self._lease_grader()
        start = time.perf_counter()
        verdict = grade(answer, task.answer, options=task.options, question=task.question, patient=True)
        self.timings["grade"] = self.timings.get("grade", 0.0) + time.perf_counter() - start
        if verdict.outcome == "ungradable":
            # Neither right nor wrong: scoring it would reward or punish what nobody knows.
            raise InfrastructureError("ungradable", verdict.reason)
        outcome = {"verdict": verdict.outcome, "reason": verdict.reason}
        return TurnResult((), world, reward=float(verdict.outcome == "correct"), outcome=outcome)

    def _demonstrate(self, episode: Episode, rng: np.random.Generator, skill: float) -> str:
        r"""Follow the task's plan; each step goes wrong with probability ``1 - skill``.

        A step goes wrong by a slip in its cell or, one time in four once something was computed, by answering too
        early. A cell that raised is tried again. The answer is what the last cell showed.
        """
        world: World = episode.world
        steps = self.tasks.get(episode.task_id).steps
        if not steps:
            raise BadInputError(
                "Problems from data have no demonstrations: leave demonstrator_skill unset. Training on them needs a "
                "model to start from (trace-gym train --model)."
            )
        wrong = rng.random() >= skill
        done = min(world.num_good, len(steps))
        if done == len(steps) or (wrong and done and rng.random() < 0.25):
            return f"\\boxed{{{world.shown.strip()}}}"
        step = steps[done]
        code = step.slips[int(rng.integers(len(step.slips)))] if wrong else step.code
        return render_tool_call(ToolCall("python", {"code": code}), self.tool_format, self.tools)

    def _dump_world(self, world: World) -> Any:
        session = world.session.to_bytes().decode() if world.session is not None else None
        return [session, world.seed, world.reseed, world.shown, world.num_good]

    def _load_world(self, data: Any, live: Any, reseed: int | None) -> World:
        session, seed, pending, shown, num_good = data
        if isinstance(live, World) and live.session is not None and self._python().owns(live.session):
            restored: State | None = live.session
        else:
            restored = self._python().load(session.encode()) if session is not None else None
        if reseed is not None:
            seed, pending = (reseed, None) if restored is None else (seed, reseed)
        return World(restored, seed, pending, shown, num_good)

    def _twin(self) -> MathCodeEnv:
        twin = object.__new__(MathCodeEnv)
        twin.__dict__.update(self.__dict__)
        twin.timings = {}
        twin._episode = None
        twin._tool = None
        twin._grader = None
        return twin

    def _lease_grader(self) -> None:
        """Have the grader's processes started before there is anything to grade."""
        if self._grader is None:
            self._grader = GraderLease()

    def _python(self) -> ToolLease:
        if self._tool is None:
            self._tool = shared_tool(**self._settings)
        return self._tool


@lru_cache(maxsize=32)  # many environments of a run share one table; it never changes
def _bundled(
    split: str, families: tuple[str, ...] | None, difficulties: tuple[int, ...] | None, size: int, seed: int
) -> TaskTable:
    return TaskSet(split, families, difficulties, size, seed)


def _refuse(call: ToolCall) -> CallError | None:
    """Return what is wrong with a call, if anything."""
    if call.name != "python":
        return CallError("unknown_tool", f"There is no tool {call.name[:64]!r}. Available: python.")
    if not isinstance(call.arguments.get("code"), str):
        return CallError("bad_arguments", 'The tool python takes one argument, "code", a string.')
    return None
