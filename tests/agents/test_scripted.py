"""The scripted agent repeats hints; agents are found by name without loading a model library."""

import asyncio
import subprocess
import sys

import pytest

from trace_gym.agents import AGENTS, make_agent
from trace_gym.agents.scripted import ScriptedAgent
from trace_gym.errors import BadInputError, MissingExtraError, TraceGymError
from trace_gym.messages import Request


def answer(requests):
    return asyncio.run(ScriptedAgent().complete(requests))


def test_the_hint_is_the_answer_and_words_are_its_tokens():
    """Every request is answered with its own hint, in order."""
    found = answer([Request((), hint="a b  c\n"), Request((), hint="")])
    assert [c.text for c in found] == ["a b  c\n", ""]
    assert [c.num_tokens for c in found] == [3, 0]
    assert all(c.token_ids is None and c.finish_reason == "stop" for c in found)


def test_a_request_without_a_hint_names_the_remedy():
    """The message says how to make an environment that demonstrates."""
    with pytest.raises(BadInputError, match="demonstrator_skill"):
        answer([Request((), hint="fine"), Request(())])


def test_an_unknown_agent_gets_the_nearest_name():
    """The error lists what exists."""
    with pytest.raises(BadInputError, match="Did you mean 'transformers'") as caught:
        make_agent("transformer")
    assert all(name in str(caught.value) for name in AGENTS)


def test_agents_are_made_by_name():
    """Options reach the class."""
    assert isinstance(make_agent("scripted"), ScriptedAgent)
    assert make_agent("openai", model="m", api_key="k", max_concurrency=3).batched is False


def test_a_missing_library_names_the_extra(monkeypatch):
    """Without the model library, one line says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "trace_gym.agents.transformers", raising=False)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]") as caught:
        make_agent("transformers", name_or_path="somewhere")
    assert isinstance(caught.value, TraceGymError)


def test_importing_the_table_loads_no_model_library():
    """`import trace_gym.agents` costs what the hub costs."""
    heavy = ("torch", "transformers", "openai")
    code = f"import sys, trace_gym.agents; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
