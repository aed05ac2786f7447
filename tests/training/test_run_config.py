"""Laws of what the main job can be asked for: mistakes are named before anything heavy starts."""

import pytest

from trace_gym.errors import BadInputError
from trace_gym.training.run_config import TrainConfig
from trace_gym.training.train import trainer_args


def test_a_run_can_be_described_in_one_file(tmp_path):
    """TOML or JSON; the same options as on the command line, and all of the trainer's."""
    path = tmp_path / "run.toml"
    path.write_text(
        'methods = ["trace"]\nlearning_rate = 1\nenv_kwargs = {max_turns = 3}\n[trainer]\npacking = false\n'
    )
    config = TrainConfig(**TrainConfig.read(path))
    assert (config.methods, config.learning_rate, config.env_kwargs) == (("trace",), 1, {"max_turns": 3})
    assert trainer_args(config, "trace", tmp_path).packing is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methds = ['trace']", "Did you mean 'methods'"),
        ("token_budget = '5'", "token_budget cannot be '5'"),
        ("methods = 'trace'", "methods cannot be 'trace'"),
        ("seed = true", "seed cannot be True"),
        ("seed = ", "Cannot read"),
    ],
)
def test_a_file_with_mistakes_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(BadInputError, match=words):
        TrainConfig.read(tmp_path / "run.toml")


def test_resuming_what_is_no_run_is_refused(tmp_path):
    """The message names the file that is missing."""
    with pytest.raises(BadInputError, match=r"config\.json"):
        TrainConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("trase",)}, "Did you mean 'trace'"),
        ({"methods": ()}, "at least one"),
        ({"methods": ("trace", "trace")}, "once"),
        ({"root_budget": 1}, "at least 2"),
        ({"env": "trace_gym/MathCod-v0"}, "Did you mean 'trace_gym/MathCode-v0'"),
        ({"advantage": "tree"}, "tree_grpo"),
        ({"predictor": "txt"}, "text"),
        ({"seed": -1}, "seed"),
        ({"skill": 2.0}, "skill"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"expansions": -1}, "expansions"),
        ({"env": "trace_gym/MathCode-v0,trace_gym/HotpotQASearch-v0", "weights": (1.0,)}, "1 weights for 2"),
        ({"env": "trace_gym/MathCode-v0,trace_gym/HotpotQASearch-v0", "tasks": "a{1..9}"}, "each source"),
        ({"weights": (1.0,)}, "single environment"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(changes, words):
    """The value, the rule and the nearest match are in the message."""
    with pytest.raises(BadInputError, match=words):
        TrainConfig(**changes)


def test_lora_without_peft_is_refused_at_once(monkeypatch):
    """The message names the extra."""
    import trace_gym.training.run_config as module
    from trace_gym.errors import MissingExtraError

    def missing(name, extra):
        raise MissingExtraError(f"{name!r} is not installed. Install it with: pip install 'trace-gym[{extra}]'")

    monkeypatch.setattr(module, "require", missing)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]"):
        TrainConfig(lora_rank=4)
