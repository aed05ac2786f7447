"""The environments. `trace_gym.ENVS` is the table of their ids; importing this package imports none of them."""
