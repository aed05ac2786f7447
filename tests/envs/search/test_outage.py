"""The law of an outage: a search server that dies fails the episodes under way, and the run goes on once it is back."""

import json
import subprocess
import sys
from types import SimpleNamespace

import gymnasium
import pytest

import trace_gym  # noqa: F401
from trace_gym.agents import make_agent
from trace_gym.evaluate import evaluate
from trace_gym.record import read_trees

CHUNK = 8
AWAY = "no retrieval server"


class Server:
    """The command in a process of its own, which can be killed and started again at the same port."""

    def __init__(self, corpus):
        self.corpus, self.port = corpus, 0
        self.start()

    def start(self):
        command = [sys.executable, "-m", "trace_gym.cli", "serve", "search", "--backend", "embedded"]
        command += ["--corpus", str(self.corpus), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().partition("listening at ")[2].partition(";")[0]
        self.port = int(self.url.rpartition(":")[2])
        assert "ready" in self.process.stdout.readline()

    @property
    def is_dead(self):
        return self.process.poll() is not None

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def engine(self):
        return {"backend": "http", "corpus": self.url, "backend_options": {"retries": 1}}


@pytest.fixture
def server(pages):
    found = Server(pages.corpus)
    yield found
    found.kill()


@pytest.mark.slow  # starts the command twice
def test_a_server_killed_in_the_middle_of_an_evaluation_costs_the_episodes_under_way_and_no_others(
    pages, server, tmp_path
):
    """Of three chunks the second loses its server once its episodes have begun; they have no reward, least of all 0."""
    agent, chunks = make_agent("scripted"), []

    class Saboteur:
        batched = True

        async def complete(self, requests):
            if chunks[-1] == CHUNK and not server.is_dead:
                server.kill()
            return await agent.complete(requests)

    def progress(done, total):
        chunks.append(done)
        if server.is_dead:
            server.start()

    def make_env():
        options = {**server.engine(), "data": str(pages.questions), "demonstrator_skill": 1.0}
        return gymnasium.make("trace_gym/HotpotQASearch-v0", **options)

    with make_env() as env:
        ids = list(env.unwrapped.task_ids)
    report = evaluate(make_env, Saboteur(), ids, out=tmp_path / "run.jsonl", chunk=CHUNK, progress=progress)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * CHUNK + [None] * CHUNK + [1.0] * CHUNK
    lost = [row["failure"] for row in rows[CHUNK : 2 * CHUNK]]
    assert all(failure["kind"] == "retrieval" and AWAY in failure["reason"] for failure in lost)
    assert report.failures == {"retrieval": CHUNK} and report.pass_at_1 == 1.0


@pytest.mark.slow  # trains, and starts the command four times
def test_a_server_killed_while_a_policy_trains_costs_rollouts_or_a_step_and_never_the_run(
    tiny_training, server, monkeypatch
):
    """Killed three times amid a step: back before the step is played again; not back, so it is skipped; and when only
    some rollouts need it, which are failures on their trees, without a reward."""
    from trace_gym.training import guards
    from trace_gym.training.report import read_jsonl

    back_in_time, too_late, for_some = 2, 4, 6
    told, doomed = [], []

    def progress(line):
        if line.startswith("trace: step"):
            told.append(line)
            if server.is_dead:
                server.start()
            if len(told) in (back_in_time, too_late, for_some):
                doomed.append(len(told))

    def pause(seconds):  # before a step is played again
        if len(told) == back_in_time:
            server.start()

    def say(request):
        if doomed and not server.is_dead:
            server.kill()
            doomed.pop()
        number = request.messages[0].content.rstrip("?").rpartition(" ")[2]
        needs_nothing = len(told) == for_some and request.seed % 4
        return f"<answer> word{number} </answer>" if needs_nothing else request.hint

    monkeypatch.setattr(guards, "time", SimpleNamespace(sleep=pause))
    with pytest.warns(UserWarning, match=f"skipped after 2 tries.*{AWAY}"):
        run = tiny_training(server.engine(), steps=8, say=say, progress=progress, step_retries=1)
    steps = [row for row in read_jsonl(run / "trace" / "metrics.jsonl") if "failures/retries" in row]
    assert [row["failures/retries"] for row in steps] == [0, 0, 1, 0, 1, 0, 0, 0]
    assert [row["failures/skipped_steps"] for row in steps] == [0, 0, 0, 0, 1, 0, 0, 0]
    nodes = [node for tree in read_trees(run / "trace" / "trees.jsonl") for node in tree.nodes]
    lost = [node for node in nodes if node.status == "failed"]
    assert 0 < len(lost) == sum(row.get("failures/count", 0) for row in steps)
    assert all(n.reward is None and n.failure.kind == "retrieval" and AWAY in n.failure.reason for n in lost)
    assert all(node.outcome is not None for node in nodes if node.reward is not None)
    assert json.loads((run / "trace" / "result.json").read_text())["after"]["failures"] == {}
