"""Laws of the loop: exact tokens, equal trees for equal seeds, deadlines, failures apart, and nothing left behind."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from trace_gym.agents.scripted import ScriptedAgent
from trace_gym.allocation import Allocator, get_allocator
from trace_gym.budget import Cost
from trace_gym.chat import ChatEncoder
from trace_gym.collect import Collector
from trace_gym.envs.text_env import TextEnv, TurnResult
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError
from trace_gym.messages import Completion, Message
from trace_gym.predictor import PosteriorPredictor
from trace_gym.snapshot import load_state
from trace_gym.tree import ROOT

END = "\x03"
TASKS = ("a", "b", "c")
NUM_MESSAGES = 2  # of a prompt


class Letters:
    """A tokenizer whose ids are code points and whose template opens a message with its role."""

    chat_template = "yes"
    eos_token, eos_token_id = END, ord(END)
    all_special_tokens = (END,)

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False):
        text = "".join(f"<{m['role']}>{m['content']}{END}" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids)).replace(END, "")


class Walk(TextEnv):
    """Every turn shows all numbers drawn so far; after "stop" an even last number is right.

    ``hook(event, episode or task id)`` is called on the way and may sleep or raise.
    """

    task_ids = (*TASKS, "d", "slow", "odd")

    def __init__(self, hook=None, prize=1.0):
        super().__init__(max_turns=5)
        self.hook = hook or (lambda event, subject: None)
        self.prize = prize

    def _begin(self, task_id, seed):
        self.hook("begin", task_id)
        return (Message("system", "walk"), Message("user", task_id)), (seed, ())

    def _play(self, episode, action):
        self.hook("step", episode)
        seed, seen = episode.world
        number = int(np.random.default_rng([seed, len(seen)]).integers(10**9))
        world = (seed, (*seen, number))
        if not action.startswith("stop"):
            return TurnResult((Message("tool", str(list(world[1])), "walk"),), world, tool_calls=1)
        self.hook("end", episode)
        verdict = "wrong" if number % 2 else "correct"
        return TurnResult((), world, self.prize * (number % 2 == 0), {"verdict": verdict, "reason": "parity"})

    def set_state(self, state, reseed=None):
        super().set_state(state, reseed)
        self.hook("load", self._episode)

    def close(self):
        self.hook("close", self)

    def _dump_world(self, world):
        return [world[0], list(world[1])]

    def _load_world(self, data, live, reseed):
        return (data[0] if reseed is None else reseed, tuple(data[1]))

    def _twin(self):
        return Walk(self.hook, self.prize)


class Talker:
    """Goes on or stops as the request's seed has it; remembers what it was asked and what it said."""

    def __init__(self, batched=True, nap=0.0, hook=None):
        self.batched = batched
        self.nap = nap
        self.hook = hook or (lambda requests: None)
        self.requests, self.said = [], []

    async def complete(self, requests):
        self.requests += requests
        self.hook(requests)
        if self.nap:
            await asyncio.sleep(self.nap * np.random.default_rng(requests[0].seed).random())
        answers = [self.answer(request) for request in requests]
        self.said += answers
        return answers

    def answer(self, request):
        rng = np.random.default_rng(request.seed)
        word = "go" if rng.random() < 0.7 or len(request.messages) == NUM_MESSAGES else "stop"
        text = f"{word} {rng.integers(10**6)}"
        ids = tuple(map(ord, text)) + ((ord(END),) if rng.random() < 0.8 else ())
        return Completion(text, ids, tuple(-rng.random(len(ids))), num_tokens=len(ids))


def collector(agent=None, make_env=Walk, **options):
    options = {"allocator": get_allocator("trace"), "predictor": PosteriorPredictor()} | options
    options.setdefault("encoder", ChatEncoder(Letters()))
    return Collector(make_env, agent or Talker(), **options)


def grow(tasks=TASKS, counts=(3, 2, 4), agent=None, make_env=Walk, **options):
    with collector(agent, make_env, **options) as made:
        return asyncio.run(made.grow(tasks, counts))


def nodes(collection):
    return [tree.nodes for tree in collection.trees]


def leaves(collection):
    return [tree.nodes[leaf] for tree in collection.trees for leaf in tree.leaves()]


# What a tree is.


@pytest.mark.parametrize("batched", [True, False])
def test_the_tokens_of_a_path_are_exactly_what_the_sampler_saw(batched):
    """Ids up to a node's parent are the prompt of the request that the node answers; its sampled ids the answer."""
    agent = Talker(batched)
    trees = grow(agent=agent, expansions=4).trees
    turns = [(tree, index, node) for tree in trees for index, node in enumerate(tree.nodes) if index != ROOT]
    assert len(turns) > 30
    seen = Counter(tuple(tree.token_ids(node.parent)) for tree, _, node in turns)
    assert seen == Counter(request.prompt_ids for request in agent.requests)
    given = Counter((completion.token_ids, completion.logprobs) for completion in agent.said)
    said = [sum(node.sampled) for _, _, node in turns]
    assert all(node.sampled[:n] == (True,) * n for n, (_, _, node) in zip(said, turns, strict=True))
    assert given == Counter(
        (node.token_ids[:n], node.logprobs[:n]) for n, (_, _, node) in zip(said, turns, strict=True)
    )


def test_the_tokens_of_a_path_spell_the_conversation():
    """With a template that only strings messages together; what nobody reads any more is left out."""
    for tree in grow(expansions=4).trees:
        for index, node in enumerate(tree.nodes):
            path = [message for i in tree.path(index) for message in tree.nodes[i].messages]
            is_over = node.status != "open"
            if is_over:
                while path[-1].role != "assistant":
                    path.pop()
            messages = [message.to_dict() for message in path]
            text = Letters().apply_chat_template(messages, add_generation_prompt=not is_over)
            if is_over and node.token_ids[-1] != ord(END):
                text = text.removesuffix(END)  # the last answer was cut; nobody closes it
            assert "".join(map(chr, tree.token_ids(index))) == text


def test_equal_seeds_give_equal_trees_whatever_the_timing():
    """Slow steps, one worker, single requests or batches: the same nodes; another seed: others."""
    rng, lock = np.random.default_rng(0), threading.Lock()

    def dawdle(event, subject):
        with lock:
            nap = rng.random() * 0.004
        time.sleep(nap)

    plain = nodes(grow(expansions=3))
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle))) == plain
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle), workers=1)) == plain
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle), agent=Talker(False, 0.01))) == plain
    assert nodes(grow(expansions=3, seed=1)) != plain


def test_a_task_plays_the_same_whoever_is_played_beside_it():
    """Trees depend on a task's place, not on the others' counts."""
    assert nodes(grow(counts=(3, 0, 4)))[2] == nodes(grow(counts=(0, 5, 4)))[2]


def test_a_batched_agent_is_asked_for_all_live_branches_at_once_in_canonical_order():
    """The first call holds the first turn of every root; seeds come in the order of the tree."""
    sizes = []
    agent = Talker(hook=lambda requests: sizes.append(len(requests)))
    collection = grow(agent=agent, expansions=2)
    assert sizes[0] == 9 and sizes[1] >= 9  # nobody stops in the first turn
    first = [request.messages[1].content for request in agent.requests[:9]]
    assert first == sorted(first)
    assert sum(sizes) == collection.cost.turns


def test_continuations_start_from_the_restored_state_and_share_the_prefix():
    """A continuation hangs under its anchor and goes on with the numbers that were drawn up to there."""
    trees = grow(expansions=4).trees
    born = [(tree, node) for tree in trees for node in tree.nodes[1:] if node.birth != ROOT]
    assert born
    starts = [(tree, node) for tree, node in born if node.parent == node.birth]
    assert starts
    for tree, node in born:
        assert node.birth in tree.path(node.parent)
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            if node.status == "open" and index != ROOT:
                numbers = json.loads(node.messages[-1].content)
                assert len(numbers) == len(tree.path(index)) - 1
                before = tree.nodes[node.parent]
                assert numbers[:-1] == (json.loads(before.messages[-1].content) if node.parent != ROOT else [])


def test_siblings_are_independent():
    """No two requests have the same seed, and no two branches the same world."""
    agent = Talker()
    trees = grow(agent=agent, expansions=4, counts=(6, 6, 6)).trees
    assert len({request.seed for request in agent.requests}) == len(agent.requests)
    drawn = Counter(
        (tree.task_id, len(tree.path(i)), node.messages[-1].content)
        for tree in trees
        for i, node in enumerate(tree.nodes)
        if i != ROOT and node.status == "open"
    )
    assert max(drawn.values()) == 1


def test_every_step_plays_new_worlds():
    """The step is part of every seed."""
    with collector() as made:
        first, second, again = (asyncio.run(made.grow(TASKS, [2, 2, 2], step=step)) for step in (0, 1, 0))
    assert nodes(first) == nodes(again) != nodes(second)
    assert second.trees[0].step == 1


# Allocation.


def test_stage_2_obeys_the_allocator():
    """Every finished bare rollout with a prefix is asked once; what is asked for is what is born there."""
    asked = []

    def rule(values, reward, budget, rng):
        asked.append((len(values), reward, budget))
        return np.bincount(rng.integers(len(values), size=budget), minlength=len(values))

    root_rule = get_allocator("uniform").root_rule
    collection = grow(expansions=3, allocator=Allocator(root_rule, rule))
    bare = [
        (len(tree.path(leaf)) - 2, tree.nodes[leaf].reward, 3)
        for tree in collection.trees
        for leaf in tree.leaves()
        if tree.nodes[leaf].birth == ROOT and len(tree.path(leaf)) > 2
    ]
    assert sorted(asked) == sorted(bare) and len(bare) == 9
    assert collection.cost.continuations == 3 * 9
    for tree in collection.trees:
        for leaf in tree.leaves():
            anchor = tree.nodes[leaf].birth
            assert anchor == ROOT or tree.nodes[anchor].value is not None


def test_a_partial_reward_counts_as_not_solved_for_the_allocator():
    """Stage 2 knows two outcomes; a reward of 0.5 is not a success and not a crash."""
    collection = grow(expansions=2, make_env=lambda: Walk(prize=0.5))
    assert {node.reward for node in leaves(collection)} == {0.0, 0.5}
    assert collection.cost.continuations == 18


def test_continuations_of_a_finished_root_start_before_slow_roots_end():
    """Stage 2 needs one outcome only; an endpoint's branches do not wait for one another."""
    events = []
    continued = threading.Event()

    def hook(event, subject):
        if event == "load" and subject.turn > 0 and subject.task_id == "a":
            continued.set()
        if event == "step" and subject.task_id == "slow" and subject.turn == 1:
            events.append(continued.wait(5))

    grow(("a", "slow"), (2, 1), agent=Talker(False), make_env=lambda: Walk(hook), expansions=2)
    assert events[0] is True


def test_collect_spends_the_budget_that_stage_1_divides():
    """Predictions, counts and trees have one entry per candidate; unplayed ones hold only their prompt."""
    with collector(expansions=1) as made:
        collection = asyncio.run(made.collect(("a", "b", "c", "d"), 4))
    assert collection.values.shape == collection.counts.shape == (4,)
    assert collection.counts.sum() == 4 == collection.cost.rollouts
    for tree, count, value in zip(collection.trees, collection.counts, collection.values, strict=True):
        assert sum(tree.nodes[leaf].birth == ROOT for leaf in tree.leaves()) == count
        assert tree.nodes[ROOT].value == value
    assert {"predict", "generate", "environment", "grade"} == set(collection.seconds)
    assert all(seconds >= 0 for seconds in collection.seconds.values())


def test_nothing_to_do_is_no_error():
    """No task, no budget, no count."""
    with collector(expansions=2) as made:
        for call in (made.collect((), 8), made.grow((), ())):
            empty = asyncio.run(call)
            assert (empty.trees, empty.cost.turns, empty.counts.shape) == ((), 0, (0,))
        for call in (made.collect(TASKS, 0), made.grow(TASKS, (0, 0, 0))):
            bare = asyncio.run(call)
            assert [len(tree) for tree in bare.trees] == [1, 1, 1] and bare.cost.rollouts == 0


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, -1)])
def test_counts_that_do_not_fit_the_tasks_are_refused(counts):
    with collector() as made, pytest.raises(BadInputError, match="one count"):
        asyncio.run(made.grow(TASKS, counts))


@pytest.mark.parametrize("option", [{"expansions": -1}, {"seed": -1}, {"workers": 0}])
def test_numbers_out_of_range_are_refused(option):
    with pytest.raises(BadInputError):
        collector(**option)


def test_a_long_conversation_is_truncated():
    """It ends as wrong where an answer may not fit any more; no sequence is longer than the limit."""
    limit = 70
    collection = grow(agent=Talker(), max_context=limit, max_tokens=12, expansions=3)
    cut = [node for node in leaves(collection) if node.status == "truncated" and "tokens" in node.outcome["reason"]]
    assert cut and all(node.reward == 0.0 and node.outcome["verdict"] == "wrong" for node in cut)
    for tree in collection.trees:
        assert all(len(tree.token_ids(leaf)) <= limit for leaf in tree.leaves())
        assert all(all(tree.nodes[leaf].sampled) for leaf in tree.leaves())


@pytest.mark.parametrize("whose", ["collector", "agent"])
def test_a_first_prompt_that_cannot_fit_is_a_failure_and_nobody_is_asked(whose):
    """Kind "context", before any generation: the task is neither scored nor given a budget; the others play."""
    agent = Talker()
    long = "b" * 40
    options = {"max_context": 70} if whose == "collector" else {}
    if whose == "agent":
        agent.max_context = 70
    with collector(agent, **options) as made:
        collection = asyncio.run(made.grow(("a", long), (3, 3)))
    root = collection.trees[1].nodes[ROOT]
    assert (root.status, root.failure.kind, root.reward) == ("failed", "context", None)
    assert len(collection.trees[1]) == 1 and collection.trees[0].leaves()
    assert {request.messages[1].content for request in agent.requests} == {"a"}


def test_an_answer_is_never_asked_for_beyond_the_limit():
    """A prompt that leaves room for a short answer only gets a short answer."""
    agent = Talker()
    grow(("a",), (2,), agent=agent, max_context=50, max_tokens=40)
    assert agent.requests
    assert all(len(request.prompt_ids) + request.max_tokens <= 50 for request in agent.requests)


def test_what_the_agent_can_take_cuts_an_answer_but_ends_no_episode():
    """An agent's own context is full only when not one token fits; a long max_tokens is no reason to stop before."""
    agent = Talker()
    agent.max_context = 120
    collection = grow(agent=agent, max_tokens=100)
    assert max(len(request.prompt_ids) for request in agent.requests) > 20
    assert collection.cost.turns > 9
    assert all(len(request.prompt_ids) + request.max_tokens <= 120 for request in agent.requests)


def test_kept_states_restore_to_their_node():
    """The restored conversation is the path's; without keep_states no node holds a state."""
    collection = grow(expansions=2, keep_states=True)
    env = Walk()
    for tree in collection.trees:
        for index in range(1, len(tree)):
            state = tree.nodes[index].state
            load_state(env, type(state).from_bytes(state.to_bytes()))
            spoken = [message.to_dict() for i in tree.path(index) for message in tree.nodes[i].messages]
            assert env.info()["messages"] == spoken
    assert all(node.state is None for tree in nodes(grow(expansions=2)) for node in tree)


# What breaks around a task.


@pytest.fixture
def gate():
    """Something to hang on; opened after the test, so that no thread outlives it for long."""
    event = threading.Event()
    yield event
    event.set()


def test_a_hanging_step_fails_its_episode_only(gate):
    """More calls hang than there are workers: each is a failure of kind "deadline", the others play as if alone."""

    def hook(event, subject):
        if event == "step" and subject.task_id == "odd":
            gate.wait(30)

    tasks, options = ("a", "odd", "b"), {"expansions": 2, "step_timeout_s": 0.3, "workers": 2}
    collection = grow(tasks, (3, 5, 3), make_env=lambda: Walk(hook), **options)
    hung = [collection.trees[1].nodes[leaf] for leaf in collection.trees[1].leaves()]
    assert [(node.status, node.failure.kind, node.reward) for node in hung] == [("failed", "deadline", None)] * 5
    assert all(node.num_generated > 0 for node in hung)  # what was said was paid for
    calm = grow(tasks, (3, 5, 3), **options)
    assert [nodes(collection)[i] for i in (0, 2)] == [nodes(calm)[i] for i in (0, 2)]


def test_an_environment_that_is_long_in_the_making_fails_its_episode_and_is_closed_in_the_end(gate):
    """Making one has the deadline of a step and holds up nobody: the other tasks play meanwhile."""
    made, closed = [], threading.Event()

    def make():
        made.append(None)
        if len(made) == 2:
            gate.wait(30)
            return Walk(lambda event, subject: event == "close" and closed.set())
        return Walk()

    collection = grow(counts=(1, 1, 1), make_env=make, step_timeout_s=0.5)
    failures = [tree.nodes[ROOT].failure for tree in collection.trees if tree.nodes[ROOT].status == "failed"]
    assert [failure.kind for failure in failures] == ["deadline"] and "making" in failures[0].reason
    assert sum(bool(tree.leaves()) for tree in collection.trees) == 2
    assert not closed.is_set()
    gate.set()
    assert closed.wait(10)


def test_a_hanging_answer_fails_its_episodes_only():
    """An endpoint that never answers for one task; nothing is scored 0."""

    class Stuck(Talker):
        async def complete(self, requests):
            if requests[0].messages[1].content == "b":
                await asyncio.sleep(60)
            return await super().complete(requests)

    collection = grow(agent=Stuck(False), completion_timeout_s=0.2)
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert [node.failure.kind for node in failed] == ["deadline"] * 2
    assert all(tree.nodes[leaf].reward is None for tree in collection.trees[1:2] for leaf in tree.leaves())
    assert [nodes(collection)[i] for i in (0, 2)] == [nodes(grow())[i] for i in (0, 2)]


@pytest.mark.parametrize("batched", [True, False])
def test_an_agent_that_fails_fails_every_branch_and_nothing_hangs(batched):
    """All branches of a tick fail at once; the round ends."""

    class Down(Talker):
        async def complete(self, requests):
            if len(requests[0].messages) > NUM_MESSAGES:
                raise InfrastructureError("endpoint", "gone")
            return await super().complete(requests)

    collection = grow(agent=Down(batched), expansions=2)
    assert {(node.status, node.failure.kind) for node in leaves(collection)} == {("failed", "endpoint")}
    assert (collection.cost.rollouts, collection.cost.continuations) == (9, 0)


@pytest.mark.parametrize("error", [InfrastructureError("sandbox_died", "gone"), ReplayDivergenceError("other")])
@pytest.mark.parametrize("event", ["step", "load"])
def test_a_broken_world_is_a_failed_node(event, error):
    """Whether a turn or a restore breaks; a state that does not replay must not end a training run."""

    def hook(happened, subject):
        if happened == event and subject.task_id == "b" and subject.turn > (event == "step"):
            raise error

    collection = grow(make_env=lambda: Walk(hook), expansions=3)
    kind = getattr(error, "kind", "replay_diverged")
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert failed and {node.failure.kind for node in failed} == {kind}
    assert all(node.reward is None for node in failed)
    assert all(tree.nodes[leaf].status != "failed" for tree in collection.trees[::2] for leaf in tree.leaves())


def test_a_turn_that_broke_the_world_keeps_what_was_said_and_what_it_cost():
    """Its tokens were generated and are paid for, whatever became of them."""

    def hook(happened, subject):
        if happened == "step" and subject.turn > 1:
            raise InfrastructureError("sandbox_died", "gone")

    agent = Talker()
    collection = grow(make_env=lambda: Walk(hook), agent=agent, expansions=2)
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert failed and all(node.messages[0].role == "assistant" and node.num_generated > 0 for node in failed)
    assert collection.cost.turns == len(agent.said)
    assert collection.cost.tokens == sum(said.num_tokens for said in agent.said)


def test_a_task_that_cannot_be_set_up_gets_no_budget():
    """Its prompt is marked failed and has no leaves; the whole budget goes to the others."""

    def hook(event, subject):
        if event == "begin" and subject == "b":
            raise InfrastructureError("index", "unreachable")

    with collector(make_env=lambda: Walk(hook)) as made:
        collection = asyncio.run(made.collect(TASKS, 8))
        given = asyncio.run(made.grow(TASKS, (1, 2, 1)))
    assert collection.counts[1] == 0 and collection.counts.sum() == 8
    for tree in (collection.trees[1], given.trees[1]):
        assert (tree.nodes[ROOT].status, tree.nodes[ROOT].failure.kind) == ("failed", "index")
        assert tree.leaves() == [] and Cost.of(tree) == Cost()


def test_if_no_task_can_be_set_up_nothing_is_played():
    def hook(event, subject):
        if event == "begin":
            raise InfrastructureError("index", "unreachable")

    with collector(make_env=lambda: Walk(hook), expansions=2) as made:
        collection = asyncio.run(made.collect(TASKS, 8))
    assert collection.counts.tolist() == [0, 0, 0] and leaves(collection) == []


def test_an_environment_that_cannot_be_made_fails_its_episode():
    """The first three serve the prompts; making any more breaks."""
    made = []

    def make_env():
        if len(made) == 3:
            raise InfrastructureError("port", "all taken")
        made.append(Walk())
        return made[-1]

    statuses = Counter(node.status == "failed" for node in leaves(grow(make_env=make_env)))
    assert statuses == {True: 6, False: 3}


# Programming errors.


class Fumbler(Talker):
    """Answers the first turn well, and then as the test has it."""

    def __init__(self, batched, fumble):
        super().__init__(batched)
        self.fumble = fumble
        self.calls_after = 0

    async def complete(self, requests):
        answers = await super().complete(requests)
        if len(requests[0].messages) == NUM_MESSAGES:
            return answers
        self.calls_after += 1
        return self.fumble(answers)


def too_few(answers):
    return answers[:-1]


def too_many(answers):
    return [*answers, answers[0]]


def key_error(answers):
    raise KeyError("bug")


def own_timeout(answers):
    raise TimeoutError("of the agent's own")


def self_cancelling(answers):
    raise asyncio.CancelledError


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("fumble", "error"),
    [
        (too_few, BadInputError),
        (too_many, BadInputError),
        (key_error, KeyError),
        (own_timeout, TimeoutError),
        (self_cancelling, asyncio.CancelledError),
    ],
)
def test_a_fumbling_agent_ends_the_round_at_once(fumble, error, batched, caplog):
    """No branch waits for ever, no error is lost in a future, and a batched agent is not asked again."""
    agent = Fumbler(batched, fumble)
    with pytest.raises(error):
        grow(agent=agent)
    gc.collect()
    assert not caplog.records
    assert agent.calls_after == 1 or not batched


def test_an_agent_without_token_ids_needs_no_encoder():
    """With one, the next prompt would lack what was said; that is refused rather than trained on."""

    class Textual(Talker):
        def answer(self, request):
            return Completion(super().answer(request).text, num_tokens=3)

    with pytest.raises(BadInputError, match="token ids"):
        grow(agent=Textual())
    agent = Textual()
    assert grow(agent=agent, encoder=None).cost.tokens == 3 * len(agent.requests)
    assert all(request.prompt_ids is None for request in agent.requests)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("error", [KeyError("bug"), TimeoutError("of its own")])
def test_a_bug_in_one_environment_ends_the_round_at_once(error, batched, gate, caplog):
    """While other steps hang: it surfaces promptly, and closing closes every environment without waiting."""
    envs, closed = [], []

    def hook(event, subject):
        if event == "close":
            closed.append(subject)
        if event == "step" and subject.task_id == "odd":
            raise error
        if event == "step":
            gate.wait(30)

    def make_env():
        envs.append(Walk(hook))
        return envs[-1]

    start = time.perf_counter()
    agent = Talker(batched)
    with pytest.raises(type(error)):
        grow(("a", "odd", "b"), (3, 1, 3), agent=agent, make_env=make_env)
    assert time.perf_counter() - start < 1.5
    assert len(agent.requests) == 7 if batched else len(agent.requests) <= 7  # none is asked a second time
    assert {id(env) for env in envs} == {id(env) for env in closed}
    gc.collect()
    assert not caplog.records


def test_an_unknown_task_is_the_callers_mistake():
    """It is no failed episode."""
    with collector(make_env=lambda: gymnasium.make("trace_gym/MathCode-v0", size=15)) as made:
        with pytest.raises(BadInputError, match="nothing-like-it"):
            asyncio.run(made.grow(["nothing-like-it"], [1]))


# Nothing is left behind.


def test_every_environment_is_closed_and_used_again():
    """As many are made as branches run side by side; closing twice is fine."""
    envs, closed = [], []

    def make_env():
        envs.append(Walk(lambda event, subject: closed.append(subject) if event == "close" else None))
        return envs[-1]

    with collector(make_env=make_env, expansions=2) as made:
        for step in range(3):
            asyncio.run(made.grow(TASKS, (2, 2, 2), step=step))
        assert len(envs) <= 12 and not closed
    made.close()
    assert len(envs) == len(closed)


def test_a_given_up_environment_is_closed_again_when_its_call_returns(gate):
    """The call may have opened something after the first closing."""
    closed = threading.Semaphore(0)
    env = None

    def hook(event, subject):
        if event == "close" and subject is env:
            closed.release()
        if event == "step":
            gate.wait(30)

    def make_env():
        nonlocal env
        env = Walk(hook)
        return env

    grow(("a",), (1,), make_env=make_env, step_timeout_s=0.1)
    assert closed.acquire(timeout=2) and not closed.acquire(blocking=False)
    gate.set()
    assert closed.acquire(timeout=2)


@pytest.mark.slow
def test_closing_does_not_wait_for_what_hangs(gate):
    """Neither for a step nor for the closing of an environment."""

    def hook(event, subject):
        if event in ("step", "close"):
            gate.wait(30 if event == "step" else 10)

    made = collector(make_env=lambda: Walk(hook), step_timeout_s=0.1)
    asyncio.run(made.grow(("a", "b"), (1, 1)))
    start = time.perf_counter()
    made.close()
    assert time.perf_counter() - start < 4


INTERRUPTED = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
sys.path.insert(0, {folder!r})
from test_collect import TASKS, Talker, Walk, collector
from trace_gym.batching import run_to_end
def hook(event, subject):
    if event == "step":
        sys.stdout.write("hangs\\n")
        threading.Event().wait()
with collector(Talker({batched}), lambda: Walk(hook), workers=2) as made:
    try:
        run_to_end(made.grow(TASKS, (2, 2, 2)))
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_an_interrupt_ends_the_program_although_steps_hang(batched):
    """Ctrl-C reaches the caller, and no thread keeps the interpreter from ending."""
    code = INTERRUPTED.format(folder=str(Path(__file__).parent), batched=batched)
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert "interrupted\n" in out and err == "" and process.returncode == 0


def children():
    """Return the pids of this process's children."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_a_given_up_math_code_leaves_no_process_behind():
    """A cell that outlasts the deadline of a step ends with its environment."""
    before = children()

    class Endless(Talker):
        def answer(self, request):
            cell = json.dumps({"name": "python", "arguments": {"code": "while True: pass"}})
            return Completion(f"<tool_call>{cell}</tool_call>", num_tokens=1)

    def make_env():
        return gymnasium.make("trace_gym/MathCode-v0", size=15, cell_timeout_s=40.0)

    with collector(Endless(), make_env, encoder=None, step_timeout_s=3.0) as made:
        collection = asyncio.run(made.grow(["chain-2-train-000000"], [2]))
    assert [node.failure.kind for node in leaves(collection)] == ["deadline"] * 2
    assert nobody_is_left(before)


def nobody_is_left(before):
    """Return whether, after at most five seconds, there are only the children that there were before."""
    deadline = time.monotonic() + 5
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    return not children() - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
def test_math_code_leaves_no_process_behind():
    """The scripted demonstrator solves everything, continuations included; closing ends the tool."""
    before = children()

    def make_env():
        return gymnasium.make("trace_gym/MathCode-v0", size=30, demonstrator_skill=1.0, cell_timeout_s=20.0)

    with collector(ScriptedAgent(), make_env, encoder=None, expansions=2, keep_states=True) as made:
        with make_env() as env:
            tasks = [task for task in env.unwrapped.task_ids if "-2-" in task][:2]
        collection = asyncio.run(made.grow(tasks, [2, 2]))
        assert children() - before
        assert collection.cost.continuations > 0
        assert {node.reward for node in leaves(collection)} == {1.0}
        assert {tree.env_id for tree in collection.trees} == {"trace_gym/MathCode-v0"}
    del collection
    gc.collect()
    assert nobody_is_left(before)
