"""BFCLMultiTurn: the multi-turn function-calling tasks of the Berkeley Function-Calling Leaderboard, v4.

Questions and simulators come from one pinned wheel (`trace_gym.envs.bfcl.backend`) that is fetched on first use. Of its
code only the eight simulator classes run, under an executor that evaluates nothing (`trace_gym.envs.bfcl.executor`).
"""
