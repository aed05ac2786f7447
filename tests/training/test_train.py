"""The main job on a toy scale: what it leaves, that it can be interrupted, and that it can be repeated."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import job_run

from trace_gym.agents import make_agent
from trace_gym.errors import BadInputError
from trace_gym.record import read_trees
from trace_gym.training.checkpoint import step_of
from trace_gym.training.report import read_jsonl
from trace_gym.training.run_config import TrainConfig, recipe
from trace_gym.training.train import train
from trace_gym.training.warm_start import WarmStart, encode_demonstration, play_demonstrations, warm_start

TOY = {
    "updates_per_step": 1,
    "env_kwargs": {"families": ["arithmetic", "power"], "difficulties": [1], "max_turns": 3},
    "token_budget": 800,
    "candidates": 4,
    "root_budget": 12,
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


def run(out, stop_at=None, **changes):
    """Run a toy job; with ``stop_at``, interrupt it when a line with these words was told."""
    told = []

    def progress(line):
        told.append(line)
        if stop_at is not None and stop_at in line:
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


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """Return the options of a job on a game that takes no time, and the folder of the job when it was done."""
    job_run.register()
    folder = tmp_path_factory.mktemp("game")
    job_run.save_policy(folder / "policy")
    options = {
        "env": job_run.ENV_ID,
        "env_kwargs": {},
        "model": str(folder / "policy"),
        "methods": ("trace",),
        "token_budget": 900,
        "learning_rate": 1e-2,
        "max_turn_tokens": 4,
        "save_every": 3,
        "updates_per_step": 2,
    }
    run(folder / "job", **options)
    return options, folder / "job"


def result(folder):
    """Return a run's result without times."""
    found = json.loads((folder / "trace" / "result.json").read_text())
    assert found["cost"].pop("seconds") > 0
    return found


def assert_same_run(given, expected):
    """Check that two runs ended with the same weights, byte for byte, and did the same on the way."""
    for name in ("model", "best"):
        weights = Path("trace") / name / "model.safetensors"
        assert (given / weights).read_bytes() == (expected / weights).read_bytes()
    assert trees(given / "trace") == trees(expected / "trace")
    assert steps(given / "trace") == steps(expected / "trace")
    assert result(given) == result(expected)


@pytest.mark.slow
def test_an_interrupted_run_is_readable_and_resumes_to_the_same_end(game, tmp_path):
    """Ctrl-C leaves whole lines; the resumed run equals the uninterrupted one, and so does any with the same seed."""
    options, whole = game
    assert any(line.get("tree/trained_rows") for line in steps(whole / "trace")), "there is something to learn"
    out = tmp_path / "job"
    with pytest.raises(KeyboardInterrupt):
        run(out, stop_at="trace: step 5,", **options)
    assert trees(out / "trace") and steps(out / "trace")
    train(TrainConfig.load(out), agent_factory, resume=True, progress=lambda line: None)
    assert_same_run(out, whole)


def kill_and_resume(command, options, out, step):
    """Kill a job shortly after a step, all its processes, and let another finish it."""
    file = out.with_suffix(".json")
    file.write_text(json.dumps({**TOY, **options, "out": str(out)}))
    settings = {"env": {**os.environ, "PYTHONWARNINGS": "ignore"}, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, "--config", file], start_new_session=True, **settings) as job:
        for line in job.stdout:
            if line.startswith(f"trace: step {step},"):
                break
        time.sleep(random.Random(step).uniform(0.0, 0.1))
        os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == -signal.SIGKILL and not (out / "trace" / "result.json").exists()
    subprocess.run([*command, "--resume", out], check=True, stderr=subprocess.PIPE, timeout=200, **settings)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(game, tmp_path):
    """SIGKILL at any moment: weights, trees and metrics end as if nothing had happened."""
    options, whole = game
    last = max(line["step"] for line in steps(whole / "trace") if "tree/leaves" in line)
    step = random.Random(0).randrange(1, last, 2)  # of two updates
    kill_and_resume([sys.executable, job_run.__file__, "train"], options, tmp_path / "job", step)
    assert_same_run(tmp_path / "job", whole)


@pytest.mark.slow
def test_two_processes_that_were_killed_and_resumed_end_as_one_that_was_not(game, tmp_path):
    """The whole job under a launcher: the same trees and result, weights to 1e-5."""
    options, whole = game
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    kill_and_resume([*launcher, job_run.__file__, "train"], options, tmp_path / "job", step=5)
    played = [
        [(step, task, [(node.token_ids, node.birth, node.reward) for node in nodes]) for step, task, nodes in found]
        for found in (trees(tmp_path / "job" / "trace"), trees(whole / "trace"))
    ]
    assert played[0] == played[1]
    assert result(tmp_path / "job") == result(whole)
    given, expected = (load_file(job / "trace" / "model" / "model.safetensors") for job in (tmp_path / "job", whole))
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_stopped_early_ends_alike_whenever_it_was_killed(game, tmp_path):
    """Patience was spent, and the process died before the result was written: after its last checkpoint, or before."""
    options, _ = game
    whole = tmp_path / "whole"
    told = run(whole, **{**options, "learning_rate": 1e-9, "patience": 2, "save_every": 2, "token_budget": 10_000})
    assert any("stopped" in line for line in told)
    last = max((whole / "trace").glob("checkpoint-*"), key=step_of).name
    lost = {"result.json", "model", "after.jsonl"}
    for name, missing in (("after", lost), ("before", lost | {last})):
        out = tmp_path / name
        shutil.copytree(whole, out, ignore=lambda _, names, missing=missing: missing & set(names))
        train(TrainConfig.load(out), agent_factory, resume=True, progress=lambda line: None)
        assert_same_run(out, whole)


def test_a_folder_in_use_is_refused(tmp_path):
    """Nothing is overwritten; the message says how to go on."""
    (tmp_path / "something").write_text("precious")
    with pytest.raises(BadInputError, match="--resume"):
        train(TrainConfig(out=str(tmp_path)), agent_factory)


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
    out, small = (
        tmp_path / "job",
        {"token_budget": 200, "candidates": 6, "root_budget": 12, "predictor": "hidden", "eval_every": 1},
    )
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
    # What came of each is told apart, wherever it is told at all.
    names = ["HotpotQASearch-v0", "MathCode-v0"]
    result = json.loads((out / "trace" / "result.json").read_text())
    assert list(result["after"]["groups"]) == names and set(names) >= set(result["sources"]) != set()
    assert sum(part["num_tasks"] for part in result["after"]["groups"].values()) == result["after"]["num_tasks"]
    assert any(f"eval/accuracy/{names[0]}" in line for line in steps(out / "trace"))
    assert f"| trace: {names[1]} " in (out / "summary.md").read_text()
    sources = TrainConfig.load(out).env_kwargs["sources"]
    assert [source["kwargs"] for source in sources] == [TOY["env_kwargs"], dict(recipe(search).env_kwargs)]
    tasks = "power-1-train-{000000..999999}"
    small |= {"eval_tasks": 1, "eval_every": 100}
    run(tmp_path / "range", tasks=tasks, model=str(folder / "trace" / "model"), methods=("trace",), **small)
    numbers = [int(task.removeprefix("power-1-train-")) for _, task, _ in trees(tmp_path / "range" / "trace")]
    assert max(numbers) > 9_999


@pytest.mark.slow
def test_questions_are_trained_on_with_what_suits_the_default_policy(cache, tmp_path):
    """Without arguments for the environment those of its recipe are taken, and kept with the run."""
    env = "trace_gym/HotpotQASearch-v0"
    out, small = (
        tmp_path / "job",
        {"demonstrations": 64, "warm_epochs": 1.0, "token_budget": 100, "max_turn_tokens": 24, "eval_tasks": 1},
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
    """Exit code 130, one line that names --resume, and no process left."""
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
            if line.startswith("trace: step 1,"):
                break
        children = descendants(job.pid)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
    assert job.returncode == 130 and f"trace-gym train --resume {out}" in err and "Traceback" not in err
    deadline = time.monotonic() + 10
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children and not left
