"""A programming error ends the round at once, and nobody waits for ever."""

import asyncio
import gc
import time

import gymnasium
import pytest
from walk import NUM_MESSAGES, Talker, Walk, collector, grow

from trace_gym.errors import BadInputError
from trace_gym.messages import Completion


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
