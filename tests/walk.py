"""A world that draws numbers, an agent that goes on or stops by lot, and a collector of both."""

import asyncio

import numpy as np

from trace_gym.allocation import get_allocator
from trace_gym.chat import ChatEncoder
from trace_gym.collect import Collector
from trace_gym.envs.text_env import TextEnv, TurnResult
from trace_gym.messages import Completion, Message
from trace_gym.predictor import PosteriorPredictor

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
        ids = ids[: request.max_tokens]
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
