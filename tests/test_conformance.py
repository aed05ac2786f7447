"""Every registered id is a well-behaved, snapshot-able environment."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import trace_gym


@pytest.fixture(params=trace_gym.ENVS)
def env_id(request):
    """Every registered id."""
    if "BFCL" in request.param:
        request.getfixturevalue("bfcl_wheel")
    return request.param


@pytest.mark.slow
def test_every_id_keeps_the_laws_of_a_snapshot(env_id):
    """check_snapshot holds on every registered id, with gymnasium's default wrappers on."""
    env = gymnasium.make(env_id, demonstrator_skill=0.7)
    try:
        laws = trace_gym.check_snapshot(env, cycles=300)
    finally:
        env.close()
    assert all(law.holds for law in laws), "\n".join(map(str, laws))


def test_every_id_passes_gymnasiums_checker(env_id):
    """check_env passes without a warning (warnings are errors in this test run)."""
    env = gymnasium.make(env_id).unwrapped
    check_env(env, skip_close_check=True)
    env.close()


@pytest.mark.parametrize("env_id", trace_gym.ENVS)
def test_ids_are_registered_as_strings(env_id):
    """A callable entry point could not be serialised."""
    spec = gymnasium.spec(env_id)
    assert isinstance(spec.entry_point, str)
    assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()).id == env_id
