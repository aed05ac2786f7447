"""Laws of finding Java, and of the process that holds it: it answers, or the failure says why; it ends with us."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from trace_gym.envs.search.retrieval import java, open_retriever
from trace_gym.errors import InfrastructureError, MissingExtraError


def fake_java(folder, version, modules="java.base"):
    folder.mkdir()
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return folder


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)


def test_a_new_enough_java_home_is_taken(no_java, monkeypatch, tmp_path):
    """With its version and modules."""
    home = fake_java(tmp_path / "jdk", "25.0.2", "java.base jdk.incubator.vector")
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = java.find_java()
    assert (found.home, found.version) == (home, 25) and "jdk.incubator.vector" in found.modules


@pytest.mark.parametrize(("version", "shown"), [("17.0.15", "Java 17"), ("1.8.0_402", "Java 8"), ("20", "Java 20")])
def test_an_old_java_is_refused_with_what_to_install(no_java, monkeypatch, tmp_path, version, shown):
    """One line: what was found, what is needed, how to get it."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", version)))
    with pytest.raises(MissingExtraError) as caught:
        java.find_java()
    text = str(caught.value)
    assert shown in text and "needs Java 21" in text and "pip install 'trace-gym[search]'" in text and "\n" not in text


def test_an_old_java_home_does_not_hide_a_newer_java_on_path(no_java, monkeypatch, tmp_path):
    """The first that is new enough is taken."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "17.0.15")))
    home = fake_java(tmp_path / "new", "21.0.8")
    (home / "bin").mkdir()
    (home / "bin" / "java").write_text("")
    (home / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert java.find_java().home == home


def test_no_java_and_no_pyserini_are_lines_that_name_the_extra(no_java):
    """Nothing was found, or something that is none."""
    with pytest.raises(MissingExtraError, match=r"found none.*trace-gym\[search\]"):
        java.find_java()
    with pytest.raises(MissingExtraError, match=r"'jnius' is not installed.*trace-gym\[search\]"):
        java.find_jar()


# The rest needs Java and Pyserini.


def why_not():
    try:
        java.find_jar()
        java.find_java()
    except MissingExtraError as error:
        return str(error)
    return ""


needs_java = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    from trace_gym.envs.search.retrieval.backends import build

    folder = tmp_path_factory.mktemp("lucene")
    rows = ({"id": f"p{n}", "contents": f"Page {n}\nword{n} common"} for n in range(20))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build("pyserini", folder / "corpus.jsonl", folder / "index")
    return folder / "index"


@pytest.fixture
def engine(index):
    share = open_retriever("pyserini", index)
    yield share
    share.close()


def pid_of(share):
    return share.engine._child.pid


def gone(pid, within_s=20):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


class TestWithJava:
    pytestmark = needs_java

    def test_a_killed_process_is_replaced(self, engine):
        """The search that was under way, or the next one, is answered by another."""
        before = pid_of(engine)
        os.kill(before, signal.SIGKILL)
        assert engine.search(["word3"], 1)[0][0].id == "p3"
        assert pid_of(engine) != before

    def test_threads_that_lose_a_process_together_are_all_answered(self, engine):
        """Each of them stops it, one after the other: a pipe that two threads close at once raises."""
        child, log = engine.engine._child, engine.engine._child._log
        inside, together, crowded = threading.Lock(), threading.Barrier(8), []

        class Log:
            def seek(self, *_):
                raise OSError

            def close(self):
                crowded.append(not inside.acquire(blocking=False))
                time.sleep(0.02)
                inside.release()

        def stop():
            together.wait()
            child.stop()

        child._log = Log()
        threads = [threading.Thread(target=stop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log.close()
        assert crowded == [False] * 8
        assert engine.search(["word3"], 1)[0][0].id == "p3"

    def test_a_process_that_is_lost_again_is_a_failure_with_the_reason_and_not_for_ever(self, engine, monkeypatch):
        """Never an empty result; the next search starts afresh."""
        from trace_gym.envs.search.retrieval.jvm import JvmChild

        ask = JvmChild.ask

        def kill_first(child, request, timeout_s):
            os.kill(child.pid, signal.SIGKILL)
            return ask(child, request, timeout_s)

        with monkeypatch.context() as patch:
            patch.setattr(JvmChild, "ask", kill_first)
            with pytest.raises(InfrastructureError, match="lost twice: it ended with code -9"):
                engine.search(["word3"], 1)
        assert engine.search(["word3"], 1)[0][0].id == "p3"

    def test_a_run_survives_the_death_of_its_process(self, tiny_training, pages, monkeypatch):
        """Killed while a policy trains it costs nothing; if it dies again and again, the step is played once more."""
        from trace_gym.envs.search.retrieval.jvm import JvmChild
        from trace_gym.training import guards
        from trace_gym.training.report import read_jsonl

        engine = {"backend": "pyserini", "corpus": str(pages.corpus)}
        ask, told, killed = JvmChild.ask, [], []

        def kill_first(child, request, timeout_s):
            killed.append(child.pid)
            with suppress(ProcessLookupError):  # another thread's search may have killed it
                os.kill(child.pid, signal.SIGKILL)
            return ask(child, request, timeout_s)

        def say(request):
            if len(told) == 1 and not killed:
                share = open_retriever(**engine)
                killed.append(pid_of(share))
                os.kill(killed[0], signal.SIGKILL)
                share.close()
            return request.hint

        def progress(line):
            if line.startswith("trace: step"):
                told.append(line)
            if len(told) == 2:
                monkeypatch.setattr(JvmChild, "ask", kill_first)

        def pause(seconds):  # before a step is played again
            monkeypatch.setattr(JvmChild, "ask", ask)

        monkeypatch.setattr(guards, "time", SimpleNamespace(sleep=pause))
        run = tiny_training(engine, steps=4, say=say, progress=progress)
        steps = [row for row in read_jsonl(run / "trace" / "metrics.jsonl") if "failures/retries" in row]
        assert [row["failures/retries"] for row in steps] == [0, 0, 1, 0] and len(set(killed)) > 2
        assert all(row["failures/count"] == row["failures/skipped_steps"] == 0 for row in steps)

    def test_a_process_that_hangs_is_late_and_replaced(self, index):
        """Deadlines are kept even if it reads nothing any more."""
        share = open_retriever("pyserini", index, timeout_s=10)
        stopped = pid_of(share)
        os.kill(stopped, signal.SIGSTOP)
        assert share.search(["word3"] * 2000, 1)[1999][0].id == "p3"
        assert pid_of(share) != stopped and gone(stopped)
        share.close()

    def test_threads_share_the_process(self, engine):
        """Each gets its own answers, also when the process is killed meanwhile."""
        wrong = []

        def work(number):
            for _ in range(10):
                if engine.search([f"word{number}"], 1)[0][0].id != f"p{number}":
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        os.kill(pid_of(engine), signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert not wrong

    def test_it_ends_when_it_is_closed(self, index):
        """No process stays, no file."""
        share = open_retriever("pyserini", index)
        pid = pid_of(share)
        share.close()
        assert gone(pid)

    @pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
    @pytest.mark.parametrize("ending", ["kill", "exit"])
    def test_it_ends_with_its_parent(self, index, ending):
        """However that ends."""
        code = (
            "import os, sys, time\nfrom trace_gym.envs.search.retrieval import open_retriever\n"
            "share = open_retriever('pyserini', sys.argv[1])\nprint(share.engine._child.pid, flush=True)\n"
            "sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code, str(index)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
            pid = int(parent.stdout.readline())
            if ending == "kill":
                parent.kill()
        assert gone(pid)

    @pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
    def test_an_interrupt_reaches_python_and_not_java(self, index):
        """Ctrl-C is a KeyboardInterrupt, and the engine goes on."""
        code = (
            "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup
            "from trace_gym.envs.search.retrieval import open_retriever\n"
            "share = open_retriever('pyserini', sys.argv[1])\n"
            "try:\n    print('ready', flush=True)\n    time.sleep(100)\n"
            "except KeyboardInterrupt:\n    print(share.search(['word3'], 1)[0][0].id)\n"
        )
        command = [sys.executable, "-c", code, str(index)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.read() == "p3\n"
        assert process.returncode == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_fork_starts_a_process_of_its_own(self, engine):
        """And leaves its parent's alone."""
        child = os.fork()
        if child == 0:
            found = engine.search(["word7"], 1)[0][0].id == "p7"
            engine.engine.close()
            os._exit(0 if found else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.search(["word8"], 1)[0][0].id == "p8"

    def test_an_index_without_texts_is_named(self, index, tmp_path):
        """What Anserini stores by itself is not enough to show a passage."""
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus" / "a.jsonl").write_text('{"id": "1", "contents": "word"}\n')
        command = [str(java.find_java().program), "-cp", str(java.find_jar()), "io.anserini.index.IndexCollection"]
        command += ["-collection", "JsonCollection", "-generator", "DefaultLuceneDocumentGenerator", "-threads", "1"]
        command += ["-input", str(tmp_path / "corpus"), "-index", str(tmp_path / "bare")]
        subprocess.run(command, check=True, capture_output=True)
        share = open_retriever("pyserini", tmp_path / "bare")
        with pytest.raises(InfrastructureError, match="build it with -storeRaw"):
            share.search(["word"], 1)
        share.close()

    def test_a_folder_that_is_no_lucene_index_is_refused(self, index, tmp_path):
        """Nor is an index of the other engine taken for one."""
        from trace_gym.envs.search.retrieval.backends import build
        from trace_gym.errors import BadInputError

        with pytest.raises(BadInputError, match="no Lucene index"):
            open_retriever("pyserini", tmp_path)
        build("embedded", index.parent / "corpus.jsonl", tmp_path / "embedded")
        with pytest.raises(BadInputError, match="no Lucene index"):
            open_retriever("pyserini", tmp_path / "embedded")
        with pytest.raises(BadInputError, match="other settings: format 'trace_gym lucene 1'"):
            open_retriever("embedded", index)

    def test_an_unknown_prebuilt_index_is_refused_with_the_nearest(self):
        """The catalogue is Pyserini's; some releases fetch it, and say so where they cannot."""
        from trace_gym.errors import BadInputError

        with pytest.raises((BadInputError, InfrastructureError)) as caught:
            open_retriever("pyserini", "beir-v1.0.0-hotpotqa.flatt")
        if isinstance(caught.value, BadInputError):
            assert "Did you mean 'beir-v1.0.0-hotpotqa.flat'" in str(caught.value)
        else:
            assert "cannot get the prebuilt index beir-v1.0.0-hotpotqa.flatt: URLError" in str(caught.value)
