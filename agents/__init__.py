"""Agents by name. Importing this module imports no model library; the classes load when one is made."""

from __future__ import annotations

import importlib
from typing import Any

from trace_gym.errors import MissingExtraError, unknown_name
from trace_gym.messages import Agent

AGENTS = {
    "scripted": "trace_gym.agents.scripted:ScriptedAgent",
    "transformers": "trace_gym.agents.transformers:TransformersAgent",
    "vllm": "trace_gym.agents.vllm:VLLMAgent",
    "vllm_server": "trace_gym.agents.vllm:VLLMServerAgent",
    "openai": "trace_gym.agents.openai:OpenAIAgent",
}
_EXTRAS = {"transformers": "train", "vllm": "vllm", "vllm_server": "vllm", "openai": "openai"}


def make_agent(name: str, **options: Any) -> Agent:
    """Make an agent by name.

    Args:
        name: A key of `AGENTS`.
        **options: Passed to the class. For those with token ids, ``name_or_path`` loads a saved model.

    Raises:
        BadInputError: If the name or an option's value is not allowed.
        MissingExtraError: If the agent's libraries are not installed; names the extra.
    """
    if name not in AGENTS:
        raise unknown_name("agent", name, AGENTS)
    module, _, attribute = AGENTS[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        raise MissingExtraError(
            f"The agent {name!r} needs {error.name!r}. Install it with: pip install 'trace-gym[{_EXTRAS[name]}]'"
        ) from error
    make = found.from_pretrained if "name_or_path" in options else found
    agent: Agent = make(**options)
    return agent
