"""HotpotQASearch: answer a question of several steps by searching a corpus of passages."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trace_gym.chat import CallError, get_tool_format, parse_tool_calls, render_tool_call
from trace_gym.envs.search.demonstrator import next_move, query_key
from trace_gym.envs.search.observation import Characters, Measure, format_hits, load_tokens
from trace_gym.envs.search.retrieval import Hit, Retriever, open_retriever
from trace_gym.envs.search.scoring import exact_match, f1, supporting_recall
from trace_gym.envs.search.tasks import Data, QuestionTable, bundled_questions, context_corpus, load_questions
from trace_gym.envs.search.tasks.renaming import Renaming
from trace_gym.envs.text_env import Episode, TurnResult, printable
from trace_gym.envs.value_env import ValueEnv
from trace_gym.errors import BadInputError, StateError
from trace_gym.messages import Message, ToolCall
from trace_gym.snapshot import EnvState

SYSTEM_PROMPT = (
    "Answer the question. Search for what you do not know, as often as needed. "
    "Then give the answer alone, in as few words as possible, in <answer></answer>."
)
# The prompt of Search-R1 (https://arxiv.org/abs/2503.09516), word for word, so that its models and results carry over.
SEARCH_R1_PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
    "{question}\n"
)
MAX_CALLS = 4  # per turn; what comes after is answered with one error
TOKEN_CHARS = 16  # that a token of a passage has at most, but for rare words

SEARCH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus; returns the passages that fit the query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for, in plain words."}},
            "required": ["query"],
        },
    },
}

_ANSWER = re.compile(r"<answer>(.*?)</answer>|^[ \t*]*Final Answer[ \t*]*:[ \t*]*([^\n]*)", re.DOTALL | re.MULTILINE)
_FINISH = re.compile(r"^[ \t*]*Action[ \t\d*]*:[ \t*]*Finish\[(.*)\]", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class World:
    """What an episode has found so far. The corpus is no part of it: it never changes.

    Attributes:
        fingerprint: Says what decides the results of a search; a state is good for an equal engine only.
        queries: The queries so far, in order, spelled alike.
        titles: Titles of the passages shown so far, each once.
        f1: Overlap of the answer with the nearest golden answer; None before there is one.
        names: Seed of the names that things are shown with; None for their own. Queries and titles have the real ones.
    """

    fingerprint: str
    queries: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    f1: float | None = None
    names: int | None = None


class HotpotQASearchEnv(ValueEnv):
    """Answer a question whose facts stand in several passages of a corpus, by searching it.

    ## Description
    The agent reads a question, searches as often as it likes and answers. The bundled questions need two passages each:
    comparisons (difficulty 1), and chains in which the second passage is known only from the first, with a hint (2) or
    without (3). HotpotQA, 2WikiMultiHopQA, MuSiQue, Bamboogle and files of their schemas load by name or path.

    ## Action Space
    Any text, the agent's whole turn. Calls of the tool ``search`` (argument ``query``), written in the ``tool_format``,
    are answered in order, at most four a turn; a turn without a call that contains ``<answer>…</answer>`` is the answer
    (the first one counts). An answer beside a call is none: the result was not seen yet. Neither calls nor answers
    count in thoughts or after a result that the agent made up. Anything else is answered with what is allowed.

    ## Observation Space
    The passages found, ``Doc 1(Title: …) …`` and so on, the best first. A query that was searched before is answered
    again, and marked.

    ## Rewards
    0.0 until the end, then 1.0 if the answer equals a golden answer after the usual normalisation (see
    `trace_gym.envs.search.scoring`), else 0.0; NaN if the infrastructure failed. With ``format_penalty`` above 0 a turn
    with which nothing could be done, and after which the episode goes on, has the reward ``-format_penalty``. The last
    turn has the outcome alone: that is what `trace_gym.evaluate` and the trainer go by, so that the penalty is for
    learners that sum the rewards of turns.

    ``info`` also has ``searches`` (how many), ``supporting_recall`` (the share of the supporting passages found, where
    the question names them) and, after the answer, ``f1``.

    ## Starting State
    The question. The search engine has no state that a search would change.

    ## Episode End
    Terminated: the answer was given, or ``max_bad_actions`` turns in a row could not be read.
    Truncated: ``max_turns`` were taken, or the infrastructure failed.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | `split` | None | `"train"` or `"eval"`; no pair of facts occurs in both. None: `"train"`, or all of `data` |
    | `fold` | 0 | which fifth of the questions the split `"eval"` holds, 0 to 4 |
    | `difficulties`, `types` | all | which bundled questions: 1 to 3; `"comparison"`, `"bridge"` |
    | `renamed` | False | things bear each other's names, dealt anew in every episode, so that only reading helps |
    | `data` | None | other questions in place of the bundled ones, see below |
    | `size` | all | at most so many questions, the first ones |
    | `backend` | `"auto"` | the search engine: `"embedded"`, `"pyserini"`, `"dense"`, `"hybrid"`, `"http"` |
    | `corpus` | None | a file or index; None: the bundled corpus, or the passages that come with `data` |
    | `backend_options` | {} | of the engine, such as `{"k1": 0.9, "b": 0.4}` |
    | `topk` | 3 | passages a query is answered with |
    | `observation_chars` | 2000 | most characters of passages for a query; they share it evenly |
    | `observation_tokens` | None | the same in tokens, in place of characters |
    | `tokenizer` | None | what counts them: the policy's tokenizer, by its name at the hub or its folder |
    | `max_searches` | None | most queries of an episode |
    | `format_penalty` | 0.0 | taken off for a turn with which nothing could be done, see Rewards |
    | `prompt` | by format | the user's first message, with `{question}`; it replaces the instructions |
    | `max_turns`, `tool_format`, … | 8, `"hermes"` | see `TextEnv` |

    `data` is the name of a data set or suite (`qa`: the four of the paper), a local file (JSON Lines, JSON, CSV,
    Parquet), `"NAME=PATH"`, or a list of these; `{"train": …, "eval": …}` gives each split data of its own.

    In the tool format `react` the prompt is that of Search-R1 and Tree-GRPO, and the results stand in
    ``<information>``; in the others the system message says what to do.

    ## Version History
    * v0: initial version.
    """

    tools: ClassVar[tuple[Mapping[str, Any], ...]] = (SEARCH_TOOL,)

    def __init__(
        self,
        split: str | None = None,
        fold: int = 0,
        difficulties: Sequence[int] | None = None,
        types: Sequence[str] | None = None,
        renamed: bool = False,
        data: Data | None = None,
        size: int | None = None,
        backend: str = "auto",
        corpus: str | Path | None = None,
        backend_options: Mapping[str, Any] | None = None,
        topk: int = 3,
        observation_chars: int = 2_000,
        observation_tokens: int | None = None,
        tokenizer: str | None = None,
        max_searches: int | None = None,
        format_penalty: float = 0.0,
        prompt: str | None = None,
        max_turns: int = 8,
        **base: Any,
    ) -> None:
        """Load the questions; the search engine starts with the first episode."""
        most_chars = observation_chars if observation_tokens is None else observation_tokens * TOKEN_CHARS
        base.setdefault("max_observation_chars", max(16_384, MAX_CALLS * (most_chars + 1_000)))
        super().__init__(max_turns=max_turns, **base)
        for name, value in (
            ("size", size),
            ("topk", topk),
            ("observation_chars", observation_chars),
            ("observation_tokens", observation_tokens),
        ):
            if value is not None and value < 1:
                raise BadInputError(f"{name} must be at least 1; got {value}.")
        if (observation_tokens is None) != (tokenizer is None):
            raise BadInputError("observation_tokens and tokenizer, which counts them, go together; give both.")
        if max_searches is not None and max_searches < 0:
            raise BadInputError(f"max_searches must not be negative; got {max_searches}.")
        if not 0 <= format_penalty <= 1:
            raise BadInputError(f"format_penalty must be in [0, 1]; got {format_penalty}.")
        if prompt is not None and "{question}" not in prompt:
            raise BadInputError(f"prompt must contain {{question}}; got {prompt[:80]!r}.")
        if renamed and data is not None:
            raise BadInputError("Only the bundled questions can be renamed; leave out renamed, or data.")
        self.renamed = renamed
        self.topk = topk
        self._budget = observation_tokens or observation_chars
        self._measure: Measure = Characters() if tokenizer is None else load_tokens(tokenizer)
        self.max_searches = max_searches
        self.format_penalty = format_penalty
        self.prompt = prompt
        self._engine = (backend, corpus, dict(backend_options or {}))
        self._data = data
        self._retriever: Retriever | None = None
        self.questions = _questions(data, split, fold, difficulties, types)
        self._ids = self.questions.ids[:size]

    @property
    def task_ids(self) -> Sequence[str]:
        """Ids of the questions on offer."""
        return self._ids

    def close(self) -> None:
        """Forget the episode and the engine; an engine that nobody holds any more is closed."""
        self._episode = None
        self._retriever = None

    def info(self) -> dict[str, Any]:
        """Return what `TextEnv.info` does, and ``searches``, ``supporting_recall`` and ``f1`` where they are known."""
        info = super().info()
        world: World = self._current().world
        info["searches"] = len(world.queries)
        recall = supporting_recall(world.titles, self.questions.get(info["task_id"]).supporting_titles)
        if recall is not None:
            info["supporting_recall"] = recall
        if world.f1 is not None:
            info["f1"] = world.f1
        return info

    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], World]:
        names = seed if self.renamed else None
        question = Renaming(names).show(self.questions.get(task_id).question)
        world = World(self._search_engine().fingerprint, names=names)
        prompt = self.prompt or (SEARCH_R1_PROMPT if self.tool_format == "react" else None)
        if prompt is not None:
            return (Message("user", prompt.replace("{question}", question)),), world
        return (Message("system", SYSTEM_PROMPT), Message("user", question)), world

    def _announce(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the prompt; in the format `react` it says by itself how to search."""
        if self.tool_format == "react":
            return messages
        return super()._announce(messages)

    def _play(self, episode: Episode, action: str) -> TurnResult:
        parsed = parse_tool_calls(action, self.tool_format, self.tools)
        if parsed.calls:
            return self._run(episode, parsed.calls, parsed.errors)
        answer = None if parsed.errors else self._answer(action, parsed.said)
        if answer is not None:
            return self._grade(episode, answer)
        if parsed.errors:
            error = parsed.errors[0]
        elif parsed.is_cut:
            error = CallError("invented_result", "Results come from the tool; nothing after one of your own is read.")
        elif "<answer>" in parsed.said:
            error = CallError("unclosed_answer", "<answer> was never closed with </answer>.")
        else:
            error = CallError("no_action", "No tool call and no answer found.")
        example = render_tool_call(ToolCall("search", {"query": "…"}), self.tool_format, self.tools)
        text = f"Error: {error.detail} Search like this: {example} or answer like this: <answer> … </answer>"
        return TurnResult((Message("user", text),), episode.world, self._penalty(episode), action_error=error.kind)

    def _penalty(self, episode: Episode) -> float | None:
        """Return the reward of a turn with which nothing could be done: no outcome, so none where the episode ends."""
        is_last = episode.turn >= self.max_turns or episode.bad_actions + 1 >= self.max_bad_actions
        return None if is_last or not self.format_penalty else -self.format_penalty

    def _answer(self, action: str, said: str) -> str | None:
        match = _ANSWER.search(said)
        if match is None and self.tool_format == "react":
            match = _FINISH.search(action.rpartition("</think>")[2])
        return None if match is None else next(group for group in match.groups() if group is not None).strip()

    def _run(self, episode: Episode, calls: Sequence[ToolCall], errors: Sequence[CallError]) -> TurnResult:
        """Answer the calls in order; however much is wrong beyond them is answered once."""
        world: World = episode.world
        calls_run = calls[:MAX_CALLS]
        left = len(calls_run) if self.max_searches is None else max(0, self.max_searches - len(world.queries))
        problems: list[CallError | None] = []
        for call in calls_run:
            problem = _refuse(call)
            if problem is None and left < 1:
                problem = CallError("no_search_left", f"All {self.max_searches} searches are used up. Answer now.")
            left -= problem is None
            problems.append(problem)
        names = Renaming(world.names)
        queries = [names.read(c.arguments["query"]) for c, p in zip(calls_run, problems, strict=True) if p is None]
        found = iter(zip(queries, self._search(queries), strict=True))
        observe = get_tool_format(self.tool_format).observe
        answers: list[Message] = []
        for call, problem in zip(calls_run, problems, strict=True):
            if problem is None:
                text, world = self._show(world, *next(found))
            else:
                text = f"Error: {problem.detail}"
            answers.append(observe(printable(call.name[:64]), text))
        if len(calls) > MAX_CALLS:
            answers.append(Message("user", f"Error: Only {MAX_CALLS} calls are run in one turn; the rest was not."))
        elif errors:
            answers.append(Message("user", f"Error: {errors[0].detail}"))
        kinds = [problem.kind for problem in problems if problem is not None]
        nothing_ran = len(kinds) == len(calls_run)
        return TurnResult(
            tuple(answers),
            world,
            self._penalty(episode) if nothing_ran else None,
            action_error=kinds[0] if nothing_ran else None,
            tool_calls=len(calls_run),
            tool_errors=len(kinds),
        )

    def _search(self, queries: Sequence[str]) -> list[list[Hit]]:
        if not queries:
            return []
        engine = self._search_engine()
        start = time.perf_counter()
        found = engine.search(queries, self.topk)
        self.timings["search"] = self.timings.get("search", 0.0) + time.perf_counter() - start
        return found

    def _show(self, world: World, query: str, hits: Sequence[Hit]) -> tuple[str, World]:
        """Return what the agent sees of a query's result, and the world afterwards."""
        key = query_key(query)
        shown = hits
        if world.names is not None:
            names = Renaming(world.names)
            shown = [replace(hit, title=names.show(hit.title), text=names.show(hit.text)) for hit in hits]
        text = format_hits(shown, self._budget, self._measure) or "No passage found."
        if key in world.queries:
            text = f"This was searched before.\n{text}"
        titles = tuple(dict.fromkeys((*world.titles, *(printable(hit.title) for hit in hits))))
        return printable(text), replace(world, queries=(*world.queries, key), titles=titles)

    def _grade(self, episode: Episode, answer: str) -> TurnResult:
        golden = self.questions.get(episode.task_id).golden_answers
        answer = Renaming(episode.world.names).read(answer)
        is_right = exact_match(answer, golden)
        verdict, reason = ("correct", "equals a golden answer") if is_right else ("wrong", "equals no golden answer")
        world = replace(episode.world, f1=f1(answer, golden))
        return TurnResult((), world, reward=float(is_right), outcome={"verdict": verdict, "reason": reason})

    def _demonstrate(self, episode: Episode, rng: np.random.Generator, skill: float) -> str:
        """Search for the supporting passages one by one and answer, see `trace_gym.envs.search.demonstrator`."""
        world: World = episode.world
        said = [message.role == "assistant" for message in episode.messages]
        start = said.index(True) if any(said) else len(said)  # the prompt is no reading matter
        names = Renaming(world.names)
        read = [names.read(message.content) for message in episode.messages[start:] if message.role != "assistant"]
        move = next_move(self.questions.get(episode.task_id), world.queries, world.titles, read, rng, skill)
        if move.query is None:
            return f"<answer> {names.show(move.answer or '')} </answer>"
        return render_tool_call(ToolCall("search", {"query": names.show(move.query)}), self.tool_format, self.tools)

    def _read(self, state: EnvState, reseed: int | None) -> tuple[Episode, np.random.Generator]:
        episode, rng = super()._read(state, reseed)
        saved, mine = episode.world.fingerprint, self._search_engine().fingerprint
        if saved != mine:
            raise StateError(
                f"The state was saved with another search engine or corpus: {saved}; here it is {mine}. "
                "Make the environment with the same backend, corpus and backend_options."
            )
        return episode, rng

    @staticmethod
    def _dump_world(world: World) -> Any:
        return [world.fingerprint, list(world.queries), list(world.titles), world.f1, world.names]

    def _load_world(self, data: Any, live: Any, reseed: int | None) -> World:
        fingerprint, queries, titles, overlap, names = data
        return World(fingerprint, tuple(queries), tuple(titles), overlap, names)

    def _twin(self) -> HotpotQASearchEnv:
        twin = object.__new__(HotpotQASearchEnv)
        twin.__dict__.update(self.__dict__)  # the engine included: who holds it last closes it
        twin.timings = {}
        twin._episode = None
        return twin

    def _search_engine(self) -> Retriever:
        if self._retriever is None:
            backend, corpus, options = self._engine
            if corpus is None and self._data is not None and backend != "http":
                corpus = context_corpus(self._data)
                if corpus is None:
                    raise BadInputError(
                        "These questions come without passages: name a corpus to search, corpus=… (a file of JSON "
                        "Lines with id and contents, an index folder, or the name of a prebuilt index)."
                    )
            self._retriever = open_retriever(backend, corpus, **options)
        return self._retriever


def _questions(
    data: Data | None,
    split: str | None,
    fold: int,
    difficulties: Sequence[int] | None,
    types: Sequence[str] | None,
) -> QuestionTable:
    if data is None:
        return bundled_questions(
            split or "train",
            None if difficulties is None else tuple(difficulties),
            None if types is None else tuple(types),
            fold,
        )
    if difficulties is not None or types is not None:
        raise BadInputError("difficulties and types choose bundled questions; leave them out with data.")
    return load_questions(data, split, fold)


def _refuse(call: ToolCall) -> CallError | None:
    """Return what is wrong with a call, if anything."""
    if call.name != "search":
        return CallError("unknown_tool", f"There is no tool {call.name[:64]!r}. Available: search.")
    if not isinstance(call.arguments.get("query"), str):
        return CallError("bad_arguments", 'The tool search takes one argument, "query", a string.')
    return None
