"""Environments whose world is a plain value: a state is the episode itself, and is written down when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trace_gym.envs.text_env import Episode, TextEnv, write_episode
from trace_gym.snapshot import EnvState, rng_from_state


@dataclass(frozen=True, slots=True)
class _Live:
    """A state as values that never change: putting it back costs no reading."""

    episode: Episode
    rng: Mapping[str, Any]


class ValueEnv(TextEnv):
    """A `TextEnv` whose world owns nothing outside of itself, such as a process.

    Its `_dump_world` must be a static method: a state outlives its environment.
    """

    def get_state(self) -> EnvState:
        """Return the state of the running episode, generators included.

        Raises:
            StateError: If no episode was started.
        """
        episode, rng = self._current(), self.np_random.bit_generator.state
        write = partial(_write, self._dump_world, episode, rng)
        return EnvState(self._env_id(), episode.task_id, write, live=_Live(episode, rng))

    def _read(self, state: EnvState, reseed: int | None) -> tuple[Episode, np.random.Generator]:
        if not isinstance(state.live, _Live):
            return super()._read(state, reseed)
        rng = self.np_random  # nobody else's, and cheaper to set than to make
        rng.bit_generator.state = state.live.rng
        return state.live.episode, rng


def _write(dump: Callable[[Any], Any], episode: Episode, rng: Mapping[str, Any]) -> str:
    return write_episode(episode, dump(episode.world), rng_from_state(rng))
