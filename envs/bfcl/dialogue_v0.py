"""BFCLMultiTurn as a dialogue, version 0, under the names that PettingZoo's environments have."""

from trace_gym.envs.bfcl.dialogue import env, parallel_env, play, raw_env

__all__ = ["env", "parallel_env", "play", "raw_env"]
