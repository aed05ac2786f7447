"""The command line as a user meets it."""

import json
import subprocess
import sys

import pytest

from trace_gym.cli import main


def call(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", ["train", "eval", "view", "data", "serve", "check"])
def test_every_command_has_help(command, capsys):
    """--help explains the command and exits with 0."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert "options:" in capsys.readouterr().out


def test_every_option_of_train_says_what_it_is_and_its_default(capsys):
    """No option without a help text."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("(default:") >= 20


def test_help_needs_no_model_library():
    """The command line answers quickly and on a machine without the training extra."""
    code = "import sys; from trace_gym.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "trace_gym/MathCod-v0"], "Did you mean 'trace_gym/MathCode-v0'"),
        (["eval", "--agent", "scriptd"], "Did you mean 'scripted'"),
        (["eval", "--agent", "transformers"], "needs --model"),
        (["eval", "--agent", "scripted", "--env", "CartPole-v1"], "does not take the arguments"),
        (["eval", "--agent", "scripted", "--env-kwargs", '{"families": ["chian"]}'], "Did you mean 'chain'"),
        (["eval", "--agent", "scripted", "--env-kwargs", '{"tool_format": "hermez"}'], "Did you mean 'hermes'"),
        (["train", "--methods", "trase"], "Did you mean 'trace'"),
        (["train", "--resume", "nowhere"], "config.json"),
        (["view", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(arguments, words, capsys):
    """What was given, what exists, the nearest match; no traceback."""
    code, out, err = call(capsys, *arguments)
    assert code == 1 and out == ""
    assert words in err and err.startswith("trace-gym: ") and err.count("\n") == 1


def test_a_bad_line_of_a_data_file_is_named(tmp_path, capsys):
    """File, line and what was expected."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "no answer"}\n')
    kwargs = json.dumps({"data": str(path)})
    code, _, err = call(capsys, "eval", "--agent", "openai", "--model", "m", "--env-kwargs", kwargs)
    assert code == 1 and "tasks.jsonl, line 2: expected" in err


@pytest.mark.slow
def test_check_prints_every_law_with_its_verdict(capsys):
    """The public checker on the command line; exit code 0 when all hold."""
    code, out, _ = call(capsys, "check", "trace_gym/MathCode-v0", "--cycles", "20")
    lines = out.strip().split("\n")
    assert code == 0 and len(lines) >= 18
    assert all(line.startswith("holds") for line in lines), out


@pytest.mark.slow
def test_eval_of_the_perfect_demonstrator_is_perfect_and_resumes(tmp_path, capsys):
    """pass@1 is 1 with an interval below; a second call plays nothing again."""
    out = tmp_path / "episodes.jsonl"
    arguments = ["eval", "--agent", "scripted", "--tasks", "12", "--out", str(out)]
    code, first, _ = call(capsys, *arguments)
    assert code == 0 and "pass@1           1.000" in first
    before = out.read_text()
    assert len(before.splitlines()) == 12
    code, again, _ = call(capsys, *arguments)
    assert code == 0 and out.read_text() == before and "12/12" in again
    code, _, err = call(capsys, *arguments, "--skill", "0.5")
    assert code == 1 and "another evaluation" in err and out.read_text() == before
