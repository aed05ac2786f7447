"""What the README shows is what happens."""

import doctest
import re
from pathlib import Path

import pytest

from trace_gym.check import _Checker
from trace_gym.cli import main
from trace_gym.training.run_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = ("README.md", "envs/math/README.md", "envs/search/README.md", "envs/bfcl/README.md")
PAGES = (*EXAMPLES, "training/README.md")


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_give_the_output_that_is_shown(page, request):
    """Every line of the interactive examples is run and compared."""
    if "BFCLMultiTurn" in (ROOT / page).read_text().partition("\n")[0]:
        request.getfixturevalue("bfcl_wheel")
    failed, tried = doctest.testfile(str(ROOT / page), module_relative=False)
    assert tried >= 10 and failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists_with_the_options_that_are_shown(page, capsys):
    """Each trace-gym line parses: unknown options or commands would exit with a usage error."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").split("\n")
    commands = [line.split("#")[0].split() for line in lines if line.startswith("trace-gym ")]
    assert len(commands) >= 4
    for command in commands:
        options = [word for word in command[2:] if word.startswith("--")]
        actions = command[2:3] if command[1] in ("data", "serve") else []
        capsys.readouterr()
        try:
            main([command[1], *actions, "--help"])
        except SystemExit:
            shown = capsys.readouterr().out
        assert all(re.search(rf"{re.escape(option)}\b", shown) for option in options), command


def test_the_configuration_that_is_shown_is_one(tmp_path):
    """A run takes the file, and the trainer the fields of its table."""
    pytest.importorskip("trl")
    from trace_gym.training.config import TraceGRPOConfig

    path = tmp_path / "run.toml"
    path.write_text(*re.findall(r"```toml\n(.*?)```", (ROOT / "training/README.md").read_text(), re.DOTALL))
    config = TrainConfig.make(TrainConfig.read(path))
    assert set(config.trainer) <= set(TraceGRPOConfig.__dataclass_fields__)


def test_the_make_targets_that_are_shown_exist():
    """make train, make test and make quick are in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)) - {"it"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_files_that_are_named_exist():
    """Pictures, benchmarks and modules named in the README are in the repository."""
    for path in re.findall(r"(?:tests|assets)/[\w/]+\.\w+", README):
        assert (ROOT / path).exists(), path


def test_the_python_example_compiles():
    """The trainer example is Python (a test of the trainer runs the same calls)."""
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        if ">>>" not in block:
            compile(block, "README", "exec")


def test_the_laws_that_are_listed_are_the_laws_that_are_checked():
    """The block under `trace-gym check` has every law, in order, and no other."""
    methods = [value for name, value in vars(_Checker).items() if name.startswith("law_")]
    sentences = [" ".join(method.__doc__.split()) for method in methods]
    assert re.findall(r"^holds +(.*)$", README, re.MULTILINE) == sentences
