"""The law of an outage: a search server that dies fails the episodes under way, and the run goes on once it is back."""

import json
import subprocess
import sys

import gymnasium
import pytest

import trace_gym  # noqa: F401
from trace_gym.agents import make_agent
from trace_gym.evaluate import evaluate

PAGES, CHUNK = 12, 4


def start(corpus, port=0):
    """Start the command; return the process and its URL once it is ready."""
    command = [sys.executable, "-m", "trace_gym.cli", "serve", "search", "--backend", "embedded", "--port", str(port)]
    process = subprocess.Popen([*command, "--corpus", str(corpus)], stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().partition("listening at ")[2].partition(";")[0]
    assert "ready" in process.stdout.readline()
    return process, url


def kill(process):
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_run_costs_the_episodes_under_way_and_no_others(tmp_path, monkeypatch):
    """Of three chunks the second loses its server once its episodes have begun; they have no reward, least of all 0."""
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path))
    pages = [{"id": f"p{n}", "contents": f"Page {n}\nword{n} is on it."} for n in range(PAGES)]
    questions = [
        {"question": f"What is on Page {n}?", "golden_answers": [f"word{n}"], "supporting_titles": [f"Page {n}"]}
        for n in range(PAGES)
    ]
    corpus, data = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    for path, rows in ((corpus, pages), (data, questions)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process, url = start(corpus)
    agent, chunks = make_agent("scripted"), []

    class Saboteur:
        batched = True

        async def complete(self, requests):
            if chunks[-1] == CHUNK and process.poll() is None:
                kill(process)
            return await agent.complete(requests)

    def progress(done, total):
        nonlocal process
        chunks.append(done)
        if process.poll() is not None:
            process, _ = start(corpus, int(url.rpartition(":")[2]))

    def make_env():
        options = {"backend": "http", "corpus": url, "backend_options": {"retries": 1}, "demonstrator_skill": 1.0}
        return gymnasium.make("trace_gym/HotpotQASearch-v0", data=str(data), **options)

    try:
        env = make_env()
        ids = list(env.unwrapped.task_ids)
        env.close()
        report = evaluate(make_env, Saboteur(), ids, out=tmp_path / "run.jsonl", chunk=CHUNK, progress=progress)
    finally:
        kill(process)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * CHUNK + [None] * CHUNK + [1.0] * CHUNK
    lost = [row["failure"] for row in rows[CHUNK : 2 * CHUNK]]
    assert all(failure["kind"] == "retrieval" and "no retrieval server" in failure["reason"] for failure in lost)
    assert report.failures == {"retrieval": CHUNK} and report.pass_at_1 == 1.0
