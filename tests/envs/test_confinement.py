"""What the kernel and the driver hold against a session, layer by layer."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import are_gone, descendants, eventually

if sys.platform != "linux":
    pytest.skip("the confinement is Linux's", allow_module_level=True)

from trace_gym.envs.math.python_tool import PythonTool, State, wire
from trace_gym.envs.math.python_tool.capabilities import capabilities
from trace_gym.envs.math.python_tool.clock import Deadline, DeadlineError, cpu_seconds
from trace_gym.envs.math.python_tool.syscalls import this_architecture

ERRNO = 0x00050000  # seccomp's answer: an error with this number

is_full = pytest.mark.skipif(capabilities().isolation != "full", reason="this machine confines only in part")


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with PythonTool(cell_timeout_s=5) as made:
        yield made


@pytest.fixture
def start(tool: PythonTool) -> State:
    return tool.new(seed=0)


def pid_of(state: State) -> int:
    process = state._node.process
    assert process is not None
    return process.pid


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# -- a session, seen from outside


@is_full
def test_a_session_can_make_no_call_that_is_not_listed(start: State) -> None:
    """Tried for real, one by one, with arguments that do nothing where a call gets through."""
    here = this_architecture()
    assert here is not None
    # Numbers 335 and 336 of x86-64 are the kernel's own way back from a probe, beyond all filters: SIGILL.
    listed = sorted({*here.permitted.values(), *here.checked.values(), 335, 336})
    code = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        reached = []
        for number in set(range(480)) - set({listed}):
            if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != 1:
                reached.append(number)
        reached
    """
    assert start.step(textwrap.dedent(code))[0].text == "[]"


@is_full
def test_a_session_has_no_rights_and_a_user_of_its_own(tool: PythonTool, start: State) -> None:
    """No capability but to read, none to gain by a program; filters on; as root, a uid that nobody else has."""
    _, state = start.step("x = 1")
    _, child = state.step("x = 2")
    _, other = start.step("x = 3")
    here, there, below_here = (status_of(pid_of(each)) for each in (state, other, child))
    for status in (here, there, below_here):
        assert int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapInh"], 16) in (0, 1 << 2)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert here["Uid"] == below_here["Uid"]
    if os.geteuid() == 0:
        assert len({here["Uid"], there["Uid"], status_of(os.getpid())["Uid"]}) == 3


def test_a_parked_session_is_stopped(start: State) -> None:
    """Nothing that a cell leaves behind can run, be it a timer or a changed machinery."""
    _, after = start.step("import signal\nsignal.signal(26, lambda *_: None)\nn = signal.setitimer(1, 0.001, 0.001)")
    assert eventually(lambda: status_of(pid_of(after))["State"].startswith("T"))
    used = cpu_seconds(pid_of(after))
    time.sleep(0.1)
    assert cpu_seconds(pid_of(after)) == used


def test_a_file_that_a_cell_opened_goes_on_in_every_state_from_where_it_was(start: State) -> None:
    """Copies of a process would share the position in a file; states must share nothing."""
    _, after = start.step("import ast\nfile = open(ast.__file__)\nfirst = file.readline()")
    second = after.step("second = file.readline()\nsecond")[0].text
    assert after.step("file.readline()")[0].text == second
    assert after.step("file.seek(0)\nfile.readline() == first")[0].text == "True"


def test_a_session_may_write_to_the_null_device(start: State) -> None:
    """People silence output that way; it is the one file that may be written to."""
    assert start.step("import os\nprint('lost', file=open(os.devnull, 'w'))\n'kept'")[0].text == "'kept'"


# -- time


@pytest.mark.slow
def test_time_without_a_cpu_is_not_the_cells_own() -> None:
    """A cell that is kept from running for longer than its budget ends well all the same."""
    with PythonTool(cell_timeout_s=0.6) as tool:
        state = tool.new().step("x = 1")[1]
        forked: set[int] = set()
        result = []
        before = descendants()
        code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n'done'"
        thread = threading.Thread(target=lambda: result.append(state.step(code)[0]))
        thread.start()
        assert eventually(lambda: bool(forked.update(descendants() - before) or forked))
        (pid,) = forked
        assert eventually(lambda: (cpu_seconds(pid) or 0) > 0.05)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        thread.join()
    assert (result[0].text, result[0].status) == ("'done'", "ok")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\nwhile True: time.sleep(0.003)", "import time\ntime.sleep(60)"]
)
def test_computing_and_sleeping_use_up_the_budget(code: str) -> None:
    """Each alone and in turns, long before the backstop of wall-clock time."""
    with PythonTool(cell_timeout_s=1) as tool:
        state = tool.new().step("x = 1")[1]
        began = time.monotonic()
        result = state.step(code)[0]
    assert result.status == "timeout"
    assert 0.7 < time.monotonic() - began < 10


def test_a_reply_that_is_there_counts_however_late_it_is_read() -> None:
    """A driver that was held up must not take a finished cell for one that hangs."""
    near, far = socket.socketpair()
    with near, far:
        wire.send(far, {"status": "ok"})
        over = Deadline(0)
        assert wire.receive(near, over)[0] == {"status": "ok"}
        far.send(b"\0")
        with pytest.raises(DeadlineError):
            wire.receive(near, over)


def test_a_frame_right_behind_another_is_kept_or_refused() -> None:
    """A worker may say two things in a row; a session that is asked one thing may not."""
    near, far = socket.socketpair()
    with near, far:
        for number in (1, 2, 3, 4):
            wire.send(far, {"n": number})
        assert [wire.receive(near, Deadline(10))[0]["n"] for _ in range(2)] == [1, 2]
        with pytest.raises(wire.ProtocolError, match="more came"):
            wire.receive(near, Deadline(10), alone=True)


def test_a_frame_from_another_process_on_the_same_socket_is_refused() -> None:
    """Who sent a frame is the kernel's word: a copy of the socket is worth nothing."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        program = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'\\2\\0\\0\\0{}'); s.detach()"
        )
        subprocess.run([sys.executable, "-c", program, str(far.fileno())], pass_fds=[far.fileno()], check=True)
        with pytest.raises(wire.ProtocolError, match="wrote on the socket of process"):
            wire.receive(near, Deadline(10), sender=os.getpid())


# -- less than everything

WITHOUT = """
    import ctypes, struct, sys
    from trace_gym.envs.math.python_tool import seccomp
    def lines(*entries): return b"".join(struct.pack("<HBBI", *entry) for entry in entries)
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    seccomp.install(lines({rules}(0x06, 0, 0, 0x7FFF0000)))
    from trace_gym.envs.math.python_tool import PythonTool
    from trace_gym.envs.math.python_tool.capabilities import capabilities
    from trace_gym.errors import BadInputError
"""
# Each answers a call as a kernel would that does not know it, or has it switched off.
NO_LANDLOCK = f"(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, {ERRNO | errno.ENOSYS}), "
NO_LISTENER = "(0x20, 0, 0, 0), (0x15, 0, 3, {number}), (0x20, 0, 0, 24), (0x45, 0, 1, 8), (0x06, 0, 0, {busy}), "
NO_EXIT_INFO = f"(0x20, 0, 0, 24), (0x15, 0, 1, 0xC040FF0B), (0x06, 0, 0, {ERRNO | errno.ENOTTY}), "


def run_without(rules: str, program: str) -> str:
    """Run a program on a kernel that has less."""
    text = textwrap.dedent(WITHOUT.format(rules=rules)) + textwrap.dedent(program)
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


needs_seccomp = pytest.mark.skipif(not capabilities().seccomp, reason="no seccomp to take things away with")


@needs_seccomp
@pytest.mark.slow
def test_without_landlock_a_session_reads_but_still_writes_and_reaches_nothing(tmp_path: Path) -> None:
    """The second rung: good enough for untrusted code, and it says what it lacks."""
    out = run_without(
        NO_LANDLOCK,
        f"""
        assert capabilities().isolation == "seccomp" and capabilities().landlock_abi == 0
        assert "Landlock" in str(capabilities())
        with PythonTool() as tool:
            state = tool.new()
            for flags in (1, 0o102, 0o1001):
                cell = f"import ctypes; ctypes.CDLL(None).open({str(tmp_path / "canary").encode()!r}, {{flags}}, 0o644)"
                print(state.step(cell)[0].text)
            print(state.step("import ctypes; ctypes.CDLL(None).socket(2, 1, 0)")[0].text)
            print(state.step("import sympy.stats; len(open('/etc/passwd').read()) > 0")[0].text)
        """,
    )
    assert out.split() == ["-1", "-1", "-1", "-1", "True"]
    assert not (tmp_path / "canary").exists()


@needs_seccomp
@pytest.mark.slow
def test_where_forks_cannot_be_refused_untrusted_code_needs_a_word() -> None:
    """The third rung: it is named, refused by default, and works on request."""
    here = this_architecture()
    assert here is not None
    out = run_without(
        NO_LISTENER.format(number=here.seccomp, busy=ERRNO | errno.EBUSY),
        """
        assert capabilities().isolation == "rlimits" and not capabilities().fork_control
        try:
            PythonTool(backend="fork").close()
        except BadInputError as error:
            print("allow_weak_isolation=True" in str(error))
        with PythonTool(backend="fork", allow_weak_isolation=True) as tool:
            print(tool.new().step("6 * 7")[0].text)
        """,
    )
    assert out.split() == ["True", "42"]


@needs_seccomp
@pytest.mark.slow
def test_an_older_kernel_does_not_tell_how_a_process_ended_and_nothing_else_changes() -> None:
    """Before Linux 6.15 the reason is unknown, and the text says so."""
    out = run_without(
        NO_EXIT_INFO,
        """
        with PythonTool() as tool:
            result, _ = tool.new().step("import os; os._exit(3)")
            print(result.status, result.text)
        """,
    )
    assert out.startswith("killed ") and "this kernel does not tell how" in out


# -- the end

DRIVER = """
    import os, signal, threading, time
    from trace_gym.envs.math.python_tool import PythonTool
    tool = PythonTool(cell_timeout_s=60, max_running=8)
    state = tool.new()
    states = [state.step("x = 1")[1] for _ in range(4)]
    stubborn = '''
    import resource, signal
    for s in set(range(1, 32)) - {9, 19}: signal.signal(s, signal.SIG_IGN)
    while True: pass
    '''
    for code in ("while True: pass", stubborn, "import time\\ntime.sleep(60)"):
        threading.Thread(target=state.step, args=(code,), daemon=True).start()
    time.sleep(0.5)
    loader = os.fork()
    if loader == 0:
        time.sleep(600)  # like a data loader: it holds a copy of every descriptor
    print(loader, *tool._sessions.backend.sandbox.pids, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def victim() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A driver in a process group of its own with running and parked sessions; and the pids that it names."""
    program = textwrap.dedent(DRIVER)
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does\n{program}"
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0)
    assert driver.stdout is not None
    named = [int(word) for word in driver.stdout.readline().split()]
    yield driver, named
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["driver", "group", "driver and supervisor"])
def test_a_driver_that_is_killed_leaves_no_process(victim: tuple[subprocess.Popen[str], list[int]], whom: str) -> None:
    """Not with cells that run and ignore every signal, nor while a forked copy holds the driver's descriptors."""
    driver, (loader, supervisor, _) = victim
    sessions = descendants(driver.pid) - {loader}
    assert len(sessions) >= 9
    if whom == "group":
        os.killpg(driver.pid, signal.SIGKILL)
    else:
        os.kill(driver.pid, signal.SIGKILL)
    if whom == "driver and supervisor":
        os.kill(supervisor, signal.SIGKILL)
    driver.wait()
    if whom != "driver and supervisor":
        assert eventually(lambda: are_gone(sessions))
        return
    # With both gone, only a running cell that ignores the hang-up is left to its own limits.
    assert eventually(lambda: len([pid for pid in sessions if not are_gone({pid})]) <= 1)
    for pid in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_signals_for_the_drivers_group_do_not_reach_the_sandbox(start: State) -> None:
    """A terminal or a job runner signals the whole group; the driver decides what becomes of its tool."""
    start.step("x = 1")
    sandbox = start._sessions.backend.sandbox  # type: ignore[attr-defined]
    assert all(os.getsid(pid) != os.getsid(0) for pid in sandbox.pids)


def test_capabilities_describe_this_machine() -> None:
    """Frozen, readable, and the same each time."""
    here = capabilities()
    assert here is capabilities()
    assert here.platform == sys.platform and "replay" in here.backends
    assert str(here).startswith(f"isolation: {here.isolation}")
    assert (here.isolation == "full") == (not here.missing)
