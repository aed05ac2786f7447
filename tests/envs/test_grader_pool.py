"""The grader's worker processes: killed in time, replaced at once, shared by threads, gone when they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from pathlib import Path

import pytest
from process_tree import descendants, eventually

from trace_gym.envs.math import grade
from trace_gym.envs.math.env import MathCodeEnv
from trace_gym.envs.math.grading import GraderLease, close_grader, pool
from trace_gym.envs.math.grading.clock import DeadlineError, WorkerDiedError
from trace_gym.envs.math.grading.pool import Pool
from trace_gym.errors import InfrastructureError

pytest.importorskip("math_verify")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
EASY = (r"\sin 2x", r"2\sin x \cos x")
PATIENCE_S = 20.0  # the promise is two seconds; a crowded machine may take its time to wake us
SLOW = r"\sin(10^{9999999})"  # a number of ten million digits reduced modulo pi


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_the_module():
    grade(*EASY, patient=True)
    yield
    close_grader()


def test_a_worker_that_is_killed_does_not_delay_the_next_comparison() -> None:
    """Spares stand by, so what follows a kill needs no import."""
    for _ in range(3):
        assert grade(SLOW, "1").outcome != "correct"
        assert grade(*EASY).outcome == "correct"
    assert len(pool._shared_pool()._idle) >= 2


def test_many_threads_get_the_verdicts_that_one_would_get() -> None:
    """The pool is shared: answers do not get mixed up between threads."""
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(10):
            good = grade(rf"\ln({number} + {turn}) + \ln 2", rf"\ln({2 * (number + turn)})")
            bad = grade(rf"\ln({number} + {turn}) + \ln 3", rf"\ln({2 * (number + turn)})")
            wrong.extend(verdict for verdict in (good,) if verdict.outcome != "correct")
            wrong.extend(verdict for verdict in (bad,) if verdict.outcome != "wrong")

    threads = [threading.Thread(target=work, args=(10 * number + 1,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@linux_only
def test_a_worker_is_confined() -> None:
    """It may gain no privileges and its system calls are filtered, where the kernel has filters."""
    template = pool._shared_pool()._source._process.pid
    assert eventually(lambda: len(descendants(template)) >= 2)
    for worker in descendants(template):
        status = Path(f"/proc/{worker}/status").read_text()
        assert "NoNewPrivs:\t1" in status


@linux_only
def test_a_dead_template_is_replaced() -> None:
    """If the warm process is killed, the next comparison starts another."""
    before = pool._shared_pool()
    before._source._process.kill()
    before._source._process.wait()
    assert grade(*EASY, patient=True).outcome == "correct"
    assert pool._shared_pool() is not before


def test_the_last_lease_ends_the_processes_and_the_next_comparison_starts_them() -> None:
    """An environment holds a lease while it grades; closing twice does nothing."""
    first, second = GraderLease(), GraderLease()
    assert grade(*EASY, patient=True).outcome == "correct"
    first.close()
    first.close()
    assert pool._pool is not None
    del second
    assert pool._pool is None
    assert grade(*EASY, patient=True).outcome == "correct"


def test_an_environment_ends_the_processes_that_it_graded_with() -> None:
    """Closing the last one leaves nothing."""
    env = MathCodeEnv(size=30)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(r"\boxed{\sin 1}")
    assert terminated and reward == 0.0, info
    assert pool._pool is not None
    env.close()
    assert pool._pool is None


def test_without_the_extra_the_exact_path_works_and_the_rest_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs more than exact arithmetic is ungradable then, in one line that says what to install."""
    monkeypatch.setattr(pool, "_missing", lambda: "math_verify")
    assert grade(r"\frac{2}{4}", "0.5").outcome == "correct"
    assert grade("7", "8").outcome == "wrong"
    verdict = grade(*EASY)
    assert verdict.outcome == "ungradable"
    assert "trace-gym[math]" in verdict.reason


def test_a_pool_that_does_not_start_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that cannot work says nothing about the answer."""

    def fail() -> None:
        raise InfrastructureError("grader_start", "no process can be started")

    close_grader()
    monkeypatch.setattr(pool, "_new_source", fail)
    with pytest.raises(InfrastructureError, match="grader_start"):
        grade(*EASY)
    assert grade("1/2", "0.5").outcome == "correct"


class ScriptedWorker:
    """Plays what a worker says; an exception is raised in its place."""

    class Clock:
        is_spent = True

    def __init__(self, script: list[object], spent: bool, late: bool) -> None:
        self.script, self.killed = deque(script), False
        self.late = late
        self.spent = spent

    def meet(self, limit) -> None:
        if self.late:
            raise DeadlineError
        if self.script and isinstance(self.script[0], EOFError):
            raise WorkerDiedError("gone")

    def clock(self, limit):
        clock = self.Clock()
        clock.is_spent = self.spent
        return clock

    def send(self, message, clock) -> None:
        pass

    def receive(self, clock):
        reply = self.script.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self) -> None:
        self.killed = True


class ScriptedSource:
    """Starts workers that all play one script."""

    is_alive = True

    def __init__(self, *script: object, spent: bool = True, late: bool = False) -> None:
        self.script, self.spent, self.late = list(script), spent, late

    def start(self) -> ScriptedWorker:
        return ScriptedWorker(self.script, self.spent, self.late)

    def close(self) -> None:
        pass


READ = {"right": "read"}


@pytest.mark.parametrize(
    ("source", "outcome", "reason"),
    [
        (ScriptedSource(READ, DeadlineError()), "wrong", "timeout"),
        (ScriptedSource(DeadlineError()), "ungradable", "timeout"),
        (ScriptedSource(READ, DeadlineError(), spent=False), "ungradable", "busy"),
        (ScriptedSource(READ, WorkerDiedError()), "wrong", "ended"),
        (ScriptedSource(WorkerDiedError()), "ungradable", "ended"),
        (ScriptedSource(READ, {"beyond": "MemoryError"}), "wrong", "MemoryError"),
        (ScriptedSource({"outcome": "correct", "reason": "so it is"}), "correct", "so it is"),
    ],
)
def test_whoever_was_being_evaluated_is_to_blame(source: ScriptedSource, outcome: str, reason: str) -> None:
    """Once the right answer was evaluated it is the other one; a busy machine is nobody's fault."""
    verdict = Pool(source).compare("a", "b", False)
    assert verdict.outcome == outcome
    assert reason in verdict.reason


def test_nobody_waits_for_workers_to_start_unless_asked_to() -> None:
    """The first verdict may be that they are starting; an environment asks for them ahead and waits."""
    source = ScriptedSource({"outcome": "correct", "reason": "so it is"}, late=True)
    late = Pool(source)
    assert late.compare("a", "b", False).outcome == "ungradable"
    for worker, _ in late._idle:
        assert not worker.killed
        worker.late = False
    assert late.compare("a", "b", False).outcome == "correct"


@linux_only
def test_a_first_answer_that_never_ends_takes_no_two_seconds_either() -> None:
    """Starting the workers counts; what they were asked to grade meanwhile is not their excuse."""
    close_grader()
    began = time.monotonic()
    assert grade(SLOW, "1").outcome != "correct"
    assert time.monotonic() - began < PATIENCE_S
    env = MathCodeEnv(size=30)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(r"\boxed{\sin 1}")
    assert terminated and reward == 0.0, info
    env.close()


def test_a_worker_that_never_comes_is_an_infrastructure_failure() -> None:
    """It did not even see the texts."""
    with pytest.raises(InfrastructureError, match="grader_died"):
        Pool(ScriptedSource(EOFError())).compare("a", "b", False)


@pytest.mark.slow
def test_where_nothing_can_be_forked_fresh_processes_do_the_same() -> None:
    """The portable workers compare, are killed, and leave spares behind."""
    from trace_gym.envs.math.grading.piped import Starter

    portable = Pool(Starter())
    try:
        assert portable.compare(*EASY, False, patient=True).outcome == "correct"
        assert portable.compare(SLOW, "1", False).outcome != "correct"
        assert portable.compare(*EASY, False).outcome == "correct"
        assert portable.compare(r"\cos x", r"\sin x", False).outcome == "wrong"
    finally:
        portable.close()


def run_driver(code: str) -> subprocess.Popen[str]:
    script = "from trace_gym.envs.math import grade\nEASY = (r'\\sin 2x', r'2\\sin x \\cos x')\n" + textwrap.dedent(
        code
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@linux_only
@pytest.mark.slow
def test_nothing_is_left_when_the_driver_is_killed() -> None:
    """Not even a worker that computes, and not even while a forked child holds the driver's sockets."""
    driver = run_driver(
        f"""
        import os, threading, time
        grade(*EASY, patient=True)
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        threading.Thread(target=grade, args=({SLOW!r}, "1"), daemon=True).start()
        time.sleep(0.2)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    family = descendants(driver.pid)
    boots = [pid for pid in family if b"boot.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(boots) >= 3
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert eventually(lambda: not any(_is_grader(pid) for pid in boots))
    for pid in family - set(boots):
        os.kill(pid, signal.SIGKILL)


def _is_grader(pid: int) -> bool:
    try:
        return b"boot.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@linux_only
@pytest.mark.slow
def test_a_forked_child_has_workers_of_its_own() -> None:
    """Parent and child grade side by side, and the child leaves nothing when it exits."""
    driver = run_driver(
        """
        import os
        from trace_gym.envs.math.grading import close_grader
        grade(*EASY, patient=True)
        child = os.fork()
        good = all(grade(*EASY, patient=True).outcome == "correct" for _ in range(5))
        if child == 0:
            close_grader()
            os._exit(0 if good else 1)
        status = os.waitpid(child, 0)[1]
        print(good and grade(*EASY).outcome == "correct" and status == 0, flush=True)
        """
    )
    assert driver.communicate(timeout=120)[0] == "True\n"
    assert driver.returncode == 0
