"""The main job on a toy scale: what it leaves, that it can be interrupted, and that it can be repeated."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trace_gym.agents import make_agent
from trace_gym.errors import BadInputError
from trace_gym.record import read_trees
from trace_gym.training.report import read_jsonl
from trace_gym.training.run_config import TrainConfig, recipe
from trace_gym.training.train import train, trainer_args
from trace_gym.training.warm_start import WarmStart, encode_demonstration, play_demonstrations, warm_start

TOY = {
    "updates_per_step": 1,
    "env_kwargs": {"families": ["arithmetic", "power"], "difficulties": [1], "max_turns": 3},
    "token_budget": 1_500,
    "candidates": 4,
    "root_budget": 16,
    "expansions": 1,
    "eval_tasks": 8,
    "curve_tasks": 4,
    "eval_every": 2,
    "save_every": 1,
    "demonstrations": 200,
    "warm_epochs": 6.0,
    "max_turn_tokens": 16,
    "threads": 1,
}


def agent_factory(model, tokenizer, **options):
    return make_agent("transformers", model=model, tokenizer=tokenizer, **options)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Share one cache, so that the policy is warm-started once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TRACE_GYM_CACHE", str(folder))
        yield folder


def run(out, stop_after=None, **changes):
    """Run a toy job; with ``stop_after``, interrupt it when that many lines were told."""
    told = []

    def progress(line):
        told.append(line)
        if stop_after is not None and sum("step" in x and "tokens" in x for x in told) >= stop_after:
            raise KeyboardInterrupt

    train(TrainConfig(out=str(out), **{**TOY, **changes}), agent_factory, progress=progress)
    return told


def steps(folder):
    """Return a run's metrics without times, which differ from run to run."""
    timed = ("time/", "train_runtime", "step_time", "eval/seconds")
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def trees(folder):
    return [(tree.step, tree.task_id, tree.nodes) for tree in read_trees(folder / "trees.jsonl")]


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "job"
    return folder, run(folder)


@pytest.mark.slow
def test_a_run_leaves_what_its_docstring_says(finished):
    """Config, metrics, trees, curves, the page, the table and the models are all there and readable."""
    folder, told = finished
    for name in ("config.json", "before.json", "curves.png", "tree.html", "summary.md"):
        assert (folder / name).stat().st_size > 0, name
    for method in ("trace", "uniform"):
        assert trees(folder / method) and steps(folder / method)
        assert (folder / method / "model" / "model.safetensors").exists()
        result = json.loads((folder / method / "result.json").read_text())
        assert result["cost"]["tokens"] >= TOY["token_budget"]
    table = (folder / "summary.md").read_text()
    assert "| trace" in table and "| uniform" in table and table in "\n".join(told)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(finished, tmp_path):
    """Trees and metrics of two CPU runs agree, times aside."""
    folder, _ = finished
    run(tmp_path / "again", methods=("trace",))
    assert trees(tmp_path / "again" / "trace") == trees(folder / "trace")
    assert steps(tmp_path / "again" / "trace") == steps(folder / "trace")


@pytest.mark.slow
def test_an_interrupted_run_is_readable_and_resumes_to_the_same_end(finished, tmp_path):
    """Ctrl-C leaves whole lines; the resumed run equals the uninterrupted one."""
    folder, _ = finished
    out = tmp_path / "job"
    with pytest.raises(KeyboardInterrupt):
        run(out, stop_after=3, methods=("trace",))
    assert trees(out / "trace") and steps(out / "trace")
    config = TrainConfig.load(out)
    train(config, agent_factory, resume=True, progress=lambda line: None)
    assert trees(out / "trace") == trees(folder / "trace")
    assert steps(out / "trace") == steps(folder / "trace")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_run_resumes_to_the_same_weights(finished, tmp_path):
    """SIGKILL at any moment: weights, trees and metrics end as if nothing had happened, and no process is left."""
    folder, _ = finished
    out, options = tmp_path / "job", tmp_path / "run.json"
    options.write_text(json.dumps({**TOY, "methods": ["trace"], "out": str(out), "save_every": 2}))
    rng = random.Random(0)
    step, delay = rng.randint(1, steps(folder / "trace")[-1]["step"] - 1), rng.uniform(0.0, 0.3)
    command = [sys.executable, "-m", "trace_gym.cli", "train"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([*command, "--config", options], stdout=subprocess.PIPE, text=True, env=environment) as job:
        for line in job.stdout:
            if line.startswith(f"trace: step {step},"):
                break
        time.sleep(delay)
        children = descendants(job.pid)
        job.kill()
    assert job.returncode == -signal.SIGKILL and not (out / "trace" / "result.json").exists()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    subprocess.run([*command, "--resume", out], check=True, capture_output=True, env=environment, timeout=200)
    for name in ("model", "best"):
        weights = Path("trace") / name / "model.safetensors"
        assert (out / weights).read_bytes() == (folder / weights).read_bytes()
    assert trees(out / "trace") == trees(folder / "trace")
    assert steps(out / "trace") == steps(folder / "trace")


def test_a_folder_in_use_is_refused(tmp_path):
    """Nothing is overwritten; the message says how to go on."""
    (tmp_path / "something").write_text("precious")
    with pytest.raises(BadInputError, match="--resume"):
        train(TrainConfig(out=str(tmp_path)), agent_factory)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_kwargs": {"max_turns": 1}}, "expansions"),
        ({"candidates": 50_000}, "candidates"),
        ({"env_kwargs": {"families": ["powr"]}}, "Did you mean 'power'"),
        ({"trainer": {"paking": True}}, "Did you mean 'packing'"),
    ],
)
def test_what_trainer_or_environment_would_refuse_is_refused_at_once(changes, words, tmp_path):
    """No warm start, no evaluation and no configuration file before the error."""
    told = []
    with pytest.raises(BadInputError, match=words):
        train(TrainConfig(out=str(tmp_path / "job"), **changes), agent_factory, progress=told.append)
    assert told == [] and not (tmp_path / "job" / "config.json").exists()


def test_lora_without_peft_is_refused_at_once(monkeypatch):
    """The message names the extra."""
    import trace_gym.training.run_config as module
    from trace_gym.errors import MissingExtraError

    def missing(name, extra):
        raise MissingExtraError(f"{name!r} is not installed. Install it with: pip install 'trace-gym[{extra}]'")

    monkeypatch.setattr(module, "require", missing)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]"):
        TrainConfig(lora_rank=4)


def test_demonstrations_are_repeatable_and_encoded_like_rollouts():
    """Equal seeds give equal demonstrations; exactly the assistant's tokens are trained on."""
    from trace_gym.chat import ChatEncoder
    from trace_gym.training.policy import PolicyShape, build_tokenizer

    config = WarmStart(env_kwargs={"size": 30}, episodes=30)
    first, second = (play_demonstrations(config, progress=lambda line: None) for _ in range(2))
    assert first == second
    tokenizer = build_tokenizer((m.content for d in first for m in d.messages), PolicyShape())
    encoder = ChatEncoder(tokenizer)
    for demonstration in first:
        row = encode_demonstration(encoder, demonstration)
        trained = [i for i, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
        said = "".join(m.content + "<|end|>" for m in demonstration.messages if m.role == "assistant")
        assert tokenizer.decode(trained) == said
        whole = tokenizer.apply_chat_template(
            [m.to_dict() for m in demonstration.messages], tools=list(demonstration.tools), tokenize=False
        )
        assert tokenizer.decode(row["input_ids"]) == whole


@pytest.mark.slow
def test_the_warm_start_is_cached_by_its_content(cache):
    """An equal configuration is not trained again; another seed is another policy."""
    config = WarmStart(env_kwargs={"size": 40, "difficulties": [1]}, episodes=40, epochs=1.0)
    told = []
    first = warm_start(config, progress=told.append)
    again = warm_start(config, progress=told.append)
    assert first == again
    assert sum("training" in line for line in told) == 1
    assert WarmStart(seed=1).key() != WarmStart().key()


@pytest.mark.slow
def test_another_model_trains_with_lora_on_a_data_file(finished, tmp_path):
    """--model, --lora-rank and a file of problems: adapters are saved as adapters, held-out problems stay out."""
    folder, _ = finished
    data = tmp_path / "problems.jsonl"
    lines = [{"question": f"What is {a} + {a + 1}?", "answer": str(2 * a + 1)} for a in range(2, 62)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "job"
    run(
        out,
        model=str(folder / "trace" / "model"),
        lora_rank=4,
        methods=("trace",),
        env_kwargs={"data": str(data), "max_turns": 3},
        token_budget=400,
    )
    assert (out / "trace" / "model" / "adapter_config.json").exists()
    trained = {task for _, task, _ in trees(out / "trace")}
    evaluated = {json.loads(line)["task_id"] for line in (out / "before.jsonl").read_text().splitlines()}
    assert trained and evaluated and not trained & evaluated


@pytest.mark.slow
def test_two_environments_and_a_million_tasks_train_in_one_run(finished, tmp_path):
    """By weight, with the recipe of each where nothing else is said; what is resumed is the same mixture."""
    folder, _ = finished
    out, small = tmp_path / "job", {"token_budget": 200, "candidates": 6, "root_budget": 12, "predictor": "hidden"}
    math, search = "trace_gym/MathCode-v0", "trace_gym/HotpotQASearch-v0"
    run(
        out,
        env=f"{math},{search}",
        weights=(2.0, 1.0),
        env_kwargs={math: TOY["env_kwargs"]},
        model=str(folder / "trace" / "model"),
        methods=("trace",),
        **small,
    )
    pool = [task.partition("/")[0] for step, task, _ in trees(out / "trace") if step == 0]
    assert sorted(pool) == ["HotpotQASearch-v0"] * 2 + ["MathCode-v0"] * 4
    sources = TrainConfig.load(out).env_kwargs["sources"]
    assert [source["kwargs"] for source in sources] == [TOY["env_kwargs"], dict(recipe(search).env_kwargs)]
    tasks = "power-1-train-{000000..999999}"
    run(tmp_path / "range", tasks=tasks, model=str(folder / "trace" / "model"), methods=("trace",), **small)
    numbers = [int(task.removeprefix("power-1-train-")) for _, task, _ in trees(tmp_path / "range" / "trace")]
    assert max(numbers) > 9_999


@pytest.mark.slow
def test_questions_are_trained_on_with_what_suits_the_default_policy(cache, tmp_path):
    """Without arguments for the environment those of its recipe are taken, and kept with the run."""
    env = "trace_gym/HotpotQASearch-v0"
    out, small = (
        tmp_path / "job",
        {"demonstrations": 64, "warm_epochs": 1.0, "token_budget": 200, "max_turn_tokens": 24},
    )
    run(out, env=env, env_kwargs=None, methods=("trace",), **small)
    assert TrainConfig.load(out).env_kwargs == recipe(env).env_kwargs
    assert trees(out / "trace") and (out / "summary.md").exists()


def descendants(pid):
    """Return the living processes below a process."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [child, *descendants(child)]
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_ends_the_command_and_its_children_and_says_how_to_go_on(finished, tmp_path):
    """Exit code 130, one line that names --resume, no process left, and the resumed command finishes the run."""
    out = tmp_path / "job"
    options = [f"--{name.replace('_', '-')}" for name in TOY]
    values = [json.dumps(value) if isinstance(value, dict) else str(value) for value in TOY.values()]
    words = [word for pair in zip(options, values, strict=True) for word in pair]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from trace_gym.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "train", "--out", str(out), "--methods", "trace", *words]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as job:
        for line in job.stdout:
            if line.startswith("trace: step 2,"):
                break
        children = descendants(job.pid)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 130 and f"trace-gym train --resume {out}" in err and "Traceback" not in err
    deadline = time.monotonic() + 10
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children and not left
    resumed = [sys.executable, "-c", code, "train", "--resume", str(out)]
    subprocess.run(resumed, check=True, capture_output=True, env=environment, timeout=200)
    assert (out / "summary.md").exists() and trees(out / "trace")
