"""Laws of what a cell gives back, on real sessions of every backend that runs CPython."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from trace_gym.envs.math.python_tool import CellResult, PythonTool
from trace_gym.envs.math.python_tool.screen import HEADER, Screen, memory_size, read_screen
from trace_gym.envs.math.python_tool.source import compile_cell, plain

pytest.importorskip("sympy")

UNDONE = ("timeout", "memory", "killed")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks: Linux only")


class Notebook:
    """Runs single cells, each in a namespace with nothing in it.

    Where a state costs nothing to leave and to come back to, that is a state with no cells; elsewhere one session
    that is emptied goes on.
    """

    def __init__(self, tool: PythonTool) -> None:
        self.tool = tool
        self.start = tool.new(seed=0)
        self._state = self.start

    def run(self, code: str) -> CellResult:
        if self.tool.backend == "fork":
            return self.start.step(code)[0]
        result, self._state = self._state.step(code)
        if result.status in UNDONE:
            self._state = self.tool.new(seed=0)
        else:
            _, self._state = self._state.step("globals().clear()")
        return result

    def run_all(self, *cells: str) -> CellResult:
        state = self.tool.new(seed=0)
        for code in cells:
            result, state = state.step(code)
        return result


@pytest.fixture(
    scope="module",
    params=[pytest.param("fork", marks=ON_LINUX), pytest.param("replay", marks=pytest.mark.slow)],
)
def notebook(request: pytest.FixtureRequest) -> Iterator[Notebook]:
    with PythonTool(backend=request.param, cell_timeout_s=2, output_chars=2000, allow_weak_isolation=True) as tool:
        yield Notebook(tool)


SHOWN = {
    "value": ("n = 6\nn * 7", "42"),
    "value after a semicolon": ("n = 2; n + 1", "3"),
    "hushed": ("n = 8\nn;", "(no output)"),
    "hushed in brackets": ("(8 +\n 1); # so", "(no output)"),
    "semicolon in a comment": ("8 # a; b", "8"),
    "semicolon in a string": ("'a;b'", "'a;b'"),
    "none": ("print", "<built-in function print>"),
    "nothing": ("[].append(1)", "(no output)"),
    "dots": ("...", "Ellipsis"),
    "comments": ("# first\n\n   # second", "(no output)"),
    "blank": (" \n\t\n", "(no output)"),
    "printed below": ("print('part', end='')\n'whole'", "part\n'whole'"),
    "bytes below": ("import sys\nsys.stdout.buffer.write(b'raw')", "raw\n3"),
    "in order": ("import sys\nprint(1)\nprint(2, file=sys.stderr)\ndisplay(3)\nprint(4)", "1\n2\n3\n4"),
    "display": ("display('x', 2.5)", "'x'\n2.5"),
    "generator": ("(i for i in 'ab')", "<generator object <genexpr> at 0x…>"),
    "array": ("import numpy\nnumpy.arange(4).reshape(2, 2)", "array([[0, 1],\n       [2, 3]])"),
    "formula": ("from sympy import *\nx = Symbol('x')\n(x + 1)**2 / 3", "(x + 1)**2/3"),
    "pretty": ("from sympy import *\npprint(Symbol('x')**2)", " 2\nx"),
    "pretty by default": ("from sympy import *\ninit_printing()\nSymbol('y')**3", " 3\ny"),
    "main": ("if __name__ == '__main__':\n    print('it is')", "it is"),
    "star": ("from math import *\nfloor(pi)", "3"),
    "annotations": ("def f(a: int): ...\nf.__annotations__", "{'a': <class 'int'>}"),
    "source": ("import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))", "def f():\n    return 1"),
    "progress": ("for i in range(4):\n    print(f'\\r{i} of 3', end='')\nprint()\nprint('end')", "3 of 3\nend"),
    "progress kept": ("for i in range(4):\n    print(i, end='\\r')", "3"),
    "line ends": ("print('a\\r\\nb')", "a\nb"),
    "colours": ("print('\\x1b[1;31mred\\x1b[0m')", "red"),
    "right to left": ("print('\u05d0\u05d1 = 1')", "\u05d0\u05d1 = 1"),
    "exit": ("print('so far')\nif 1:\n    quit()\nprint('no')", None),
    "own stream": ("import io, sys\nsys.stdout = io.StringIO()\nprint('lost')\n5", "5"),
    "stream put back": (
        "import io, sys\nsys.stdout = b = io.StringIO()\nprint('in')\nsys.stdout = sys.__stdout__\nprint(b.getvalue())",
        "in",
    ),
    "stream wrapped": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('ü')",
        "ü",
    ),
    "no stream": ("import sys\nsys.stdout = None\nprint(1)\n2", "2"),
    "warned once": ("import numpy\nfor _ in range(9):\n    v = numpy.log(0)\nfloat(v)", None),
    "deprecated": (
        "import warnings\nwarnings.warn('old way', DeprecationWarning)",
        "line 2: DeprecationWarning: old way",
    ),
    "forgotten": ("class A:\n    def __del__(self): 1 / 0\nA()\nNone", None),
    "logged": ("import logging\nlogging.warning('hm')", "WARNING:root:hm"),
    "tests": (
        "import doctest\ndef f():\n    '''\n    >>> 7\n    7\n    '''\ndoctest.testmod()[:]",
        "(0, 1)",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_cell_gives_back_what_a_notebook_shows(notebook: Notebook, name: str) -> None:
    """Prints, warnings and the value of the last expression, as they end up on the screen."""
    code, text = SHOWN[name]
    result = notebook.run_all(code) if "init_printing" in code else notebook.run(code)  # that one is there to stay
    assert result.status == "ok"
    if text is not None:
        assert "\n".join(line.rstrip() for line in result.text.split("\n")) == text


def test_what_a_notebook_says_beside_is_one_line(notebook: Notebook) -> None:
    """Warnings come once a cell, and errors nobody can catch come in one line."""
    log = SHOWN["warned once"][0]
    assert notebook.run(log).text == "line 3: RuntimeWarning: divide by zero encountered in log\n-inf"
    assert notebook.run_all(log, log).text == notebook.run(log).text
    assert notebook.run("7 is 7").text.count("SyntaxWarning") == 1
    assert notebook.run(SHOWN["forgotten"][0]).text == "Ignored in A.__del__: ZeroDivisionError: division by zero"
    assert notebook.run(SHOWN["exit"][0]).text == "so far\nexit() was called: the cell ended here, the session goes on."
    assert notebook.run("exit('bad')").status == "error"


ERRORS = {
    "name": ("\nfoo", "line 2: foo\nNameError: name 'foo' is not defined"),
    "below": ("print('part', end='')\n{}['k']", "part\nline 2: {}['k']\nKeyError: 'k'"),
    "place": (
        "sum_ = (3 +* 4) - 1",
        "line 1: sum_ = (3 +* 4) - 1\n                   ^\nSyntaxError: invalid syntax",
    ),
    "place at the end": ("for i in [1]\n    i", "line 1: for i in [1]\nSyntaxError: expected ':'"),
    "empty block": (
        "if 1:\nprint(2)",
        "line 2: print(2)\n        ^\nIndentationError: expected an indented block after 'if' statement on line 1",
    ),
    "return": (
        "n = 1\nreturn n",
        "line 2: return n\n        ^\nSyntaxError: 'return' outside function. Print the value instead",
    ),
    "only parsed, never run": ("print('no')\nreturn", None),
    "repr": (
        "class A:\n    def __repr__(self):\n        return 1 / 0\nA()",
        "line 4: A()\nline 3, in __repr__: return 1 / 0\nZeroDivisionError: division by zero",
    ),
    "repr of a wrong type": (
        "class A:\n    __repr__ = lambda self: 8\nA()",
        "line 3: A()\nTypeError: __repr__ returned non-string (type int)",
    ),
    "message": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "line 3: raise E\nE: <exception str() failed>",
    ),
    "group": (
        "raise ExceptionGroup('two', [ValueError(1), KeyError('b')])",
        "line 1: raise ExceptionGroup('two', [ValueError(1), KeyError('b')])\n"
        "ExceptionGroup: two (2 sub-exceptions)\n  ValueError: 1\n  KeyError: 'b'",
    ),
    "evaluated": ("eval('2 +')", "line 1: eval('2 +')\nSyntaxError: invalid syntax"),
    "recursion": (
        "def f(n):\n    return f(n + 1)\nf(0)",
        "line 3: f(0)\n" + 3 * "line 2, in f: return f(n + 1)\n" + "RecursionError: maximum recursion depth exceeded",
    ),
    "deep value": ("v = []\nfor _ in range(99999): v = [v]\nv", None),
    "shadowed": (
        "sum = 3\nsum([1])",
        "line 2: sum([1])\nTypeError: 'int' object is not callable. "
        "Sum was assigned a value: `del sum` brings the built-in back",
    ),
    "digits": ("10 ** 4400", None),
    "long": ("raise ValueError('v' * 99999)", None),
    "no text": ("n = '\ud800'", None),
    "nul": ("n = 1\0", None),
    "nested": ("-" * 99999 + "1", "SyntaxError: the code is nested too deeply"),
    "chained": ("v" + "[0]" * 29999, "SyntaxError: the code is nested too deeply"),
    "far right": ("v = [" + "1, " * 400 + "2 2" + ", 1" * 400 + "]", None),
    "lost stream": ("import sys\ndel sys.stdout\nprint(1)", "line 3: print(1)\nRuntimeError: lost sys.stdout"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_told_in_few_lines_of_the_cell(notebook: Notebook, name: str) -> None:
    """The cell's lines that led there, the place in a line that does not parse, the message; nothing else."""
    code, text = ERRORS[name]
    result = notebook.run(code)
    assert result.status == "error"
    assert "Traceback" not in result.text and ".py" not in result.text and len(result.text) < 1500
    if text is not None:
        assert result.text == text


def test_the_place_of_an_error_far_to_the_right_is_shown(notebook: Notebook) -> None:
    """Of a long line a piece around the place is shown, with the caret below it."""
    line, caret, _ = notebook.run(ERRORS["far right"][0]).text.split("\n")
    assert len(line) < 220 and line[len(caret) - 1 :].startswith("2 2")
    assert notebook.run(ERRORS["only parsed, never run"][0]).text.startswith("line 2: return")


PROCESSES, THREADS = "new processes are not allowed here: do the work", "threads are not allowed here: call"
NETWORK, FILES = "there is no network here: work with", "files cannot be written here: keep the data"
TYPING, PLOTS = "as no one can type: put the value", "plots cannot be seen here, print"
SHELL, ASYNCIO = "nothing can be installed: leave the line out", "does not work here: write plain functions"
REFUSED = {
    "input": ("n = int(input('n: '))", TYPING),
    "standard input": ("import sys\nfor line in sys.stdin: pass", TYPING),
    "bytes of standard input": ("import sys\nsys.stdin.buffer.readline()", TYPING),
    "debugger": ("breakpoint()", "print what you want to see"),
    "shell": ("!pip install sympy", SHELL),
    "installer": ("pip install sympy", SHELL),
    "installer as a module": ("import pip\npip.main(['list'])", "nothing can be installed here"),
    "magic": ("n = 1\n%timeit n", "magic commands (%) do not work here: leave the line out"),
    "fence": ("n = 1\n```\nmore", "leave the markdown fence (```) out"),
    "not installed": (
        "import dolphins",
        "Nothing can be installed here: use numpy, sympy or the standard library",
    ),
    "plot": ("import matplotlib.pyplot as plt\nplt.plot([1])", PLOTS),
    "plot by name": ("from matplotlib import pyplot", PLOTS),
    "notebook": ("from IPython.display import display", "display(x) works without it"),
    "command": ("import subprocess\nsubprocess.run(['ls'], capture_output=True)", PROCESSES),
    "system": ("import os\nos.system('ls')", PROCESSES),
    "pipe": ("import os\nos.popen('ls').read()", PROCESSES),
    "process": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", PROCESSES),
    "processes": ("import multiprocessing\nmultiprocessing.Pool(2)", "rocesses are not allowed here: do the work"),
    "executor": (
        "from concurrent.futures import ProcessPoolExecutor as P\nwith P() as p: p.submit(abs, 1)",
        PROCESSES,
    ),
    "thread": ("import threading\nthreading.Thread(target=print).start()", THREADS),
    "threads": ("from concurrent.futures import ThreadPoolExecutor as P\nwith P() as p: p.submit(abs, 1)", THREADS),
    "event loop": ("import asyncio\nasync def f(): pass\nasyncio.run(f())", ASYNCIO),
    "await": ("import asyncio\nawait asyncio.sleep(0)", ASYNCIO),
    "file": ("open('n.txt', 'w')", FILES),
    "file of numpy": ("import numpy\nnumpy.save('n.npy', [1])", FILES),
    "folder": ("import pathlib\npathlib.Path('n').mkdir()", FILES),
    "removed": ("import os\nos.remove('n.txt')", FILES),
    "temporary": ("import tempfile\ntempfile.mkdtemp()", "iles cannot be written here: keep the data"),
    "page": ("from urllib.request import urlopen\nurlopen('http://localhost')", NETWORK),
    "socket": ("import socket\nsocket.create_connection(('localhost', 1))", NETWORK),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_here_is_answered_with_what_does(notebook: Notebook, name: str) -> None:
    """One line below the cell's own says that it cannot be, and what to do instead."""
    code, told = REFUSED[name]
    if name in ("processes", "event loop", "temporary") and not _confined(notebook):
        pytest.skip("nothing but the kernel refuses it")
    result = notebook.run(f"print('before')\n{code}" if "\n" in code else code)
    assert result.status == "error"
    *_, last = result.text.split("\n")
    assert told in last and len(result.text.split("\n")) <= 3
    assert notebook.run("6 * 7").text == "42"


def _confined(notebook: Notebook) -> bool:
    return "PermissionError" in notebook.run("import os\nos.listdir('/proc/self/fd')").text


WRAPPED = {
    "fence": ("```python\nprint(3)\n```", "3"),
    "fence and blanks": ("\n  ```py\n  print(3)\n  ```  \n\n", "3"),
    "fence without a line": ("```\n7 - 4```", "3"),
    "fences in a text": ("```python\nt = '''\n```\n'''\nlen(t)\n```", "5"),
    "ticks": ("len('```')", "3"),
    "indented": ("    a = 1\n    a + 2", "3"),
    "indented but one line": ("a = 1\n    a += 2\n    print(a)", "3"),
    "indented at first": ("  a = 1\na + 2", "3"),
    "indented with tabs": ("\t\ta = 1\n\t\ta + 2", "3"),
    "text left alone": ("    t = '''\n    b'''\n    len(t)", "6"),
    "text at the margin": ("    t = '''\nb'''\n    len(t) + 1", "3"),
    "windows": ("a = 1\r\nprint(a + 2)\r\n", "3"),
    "byte order": ("\ufeff1 + 2", "3"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapping_is_taken_off_and_nothing_else(notebook: Notebook, name: str) -> None:
    """Fences and indents around the whole cell go; what stands in its strings stays."""
    code, text = WRAPPED[name]
    result = notebook.run(code)
    assert (result.text, result.status) == (text, "ok")


@pytest.mark.parametrize("code", ["```python\nn = 1\n1 / 0\n```", "\n\n    1 / 0", "n = 1\n    n += 1\n    1 / 0"])
def test_lines_keep_the_numbers_they_have_in_the_action(notebook: Notebook, code: str) -> None:
    """Taking off a wrapping moves no line."""
    assert notebook.run(code).text == "line 3: 1 / 0\nZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "code",
    ["a = 1\nb = 2\n    c = 3", "if 1:\n\ta = 1\n        b = 2", "```\na\n```\ntext\n```\nb\n```", "    a = (\n"],
)
def test_code_that_cannot_be_mended_is_an_error_about_what_was_written(code: str) -> None:
    """A repair that does not lead to Python is no repair."""
    with pytest.raises(SyntaxError):
        compile_cell(plain(code), "<cell 1>")
    assert plain(code) == code


def test_a_valid_program_is_compiled_as_it_stands() -> None:
    """Nothing is repaired that needs no repair."""
    for module in (textwrap, random):
        code = Path(str(module.__file__)).read_text()
        source = compile_cell(plain(code), "<cell 1>")
        assert "\n".join(source.lines) == code


# -- what a cell leaves behind -----------------------------------------------------------------------------------------

WRECKS = {
    "built-ins": "import builtins\nfor n in list(vars(builtins)):\n    if n != 'delattr': delattr(builtins, n)",
    "names": "globals().clear()",
    "its built-ins": "__builtins__ = None",
    "streams": "import sys\nsys.stdout.detach()\ndel sys.stdout, sys.stderr, sys.stdin, sys.__stdout__, sys.__stdin__",
    "recoded": "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')",
    "hooks": "import sys\nsys.displayhook = None\nsys.settrace(lambda *_: 1 / 0)\nsys.setprofile(lambda *_: 1 / 0)",
    "depth": "import sys\nsys.setrecursionlimit(60)\nraise ValueError",
    "alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)",
    "modules": "import sys\nsys.modules.clear()",
}


@pytest.mark.parametrize("name", WRECKS)
def test_the_next_cell_finds_a_working_interpreter(notebook: Notebook, name: str) -> None:
    """Whatever a cell does to built-in names, streams and hooks is over with it."""
    if name == "alarm" and sys.platform == "win32":
        pytest.skip("no timers")
    probe = "import time\ntime.sleep(0.02)\nprint(len('äb'), __name__)\nsorted({2, 1})"
    assert notebook.run_all(WRECKS[name], probe).text == "2 __main__\n[1, 2]"


def test_the_last_value_is_an_underscore_until_the_cell_has_its_own(notebook: Notebook) -> None:
    """As in a notebook, and a variable of that name goes first."""
    assert notebook.run_all("40 + 1", "x = 5", "_ + 1").text == "42"
    assert notebook.run_all("41", "for _ in range(3): pass", "_").text == "2"


def test_a_function_that_fails_later_is_shown_with_its_cell(notebook: Notebook) -> None:
    """Lines of other cells are told apart, also where two cells have the same line numbers."""
    text = notebook.run_all("def half(n):\n    return n / m", "m = 0\nhalf(1)").text
    assert text == "line 2: half(1)\ncell 1, line 2, in half: return n / m\nZeroDivisionError: division by zero"


ENDLESS = {
    "loop": "print('start', end='')\nwhile True: pass",
    "print": "i = 0\nprint('start')\nwhile True:\n    i += 1\n    print(i)",
    "value": "class A:\n    def __repr__(self):\n        print('start')\n        while True: pass\nA()",
    "error": "class E(Exception):\n    def __str__(self):\n        print('start')\n        while True: pass\nraise E",
    "stream": "import sys\nprint('start')\nclass S:\n    def flush(self):\n        while True: pass\nsys.stdout = S()",
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("fork", marks=ON_LINUX), "replay"])
def test_a_cell_that_does_not_end_keeps_what_it_printed(backend: str) -> None:
    """Also where showing its value or its error does not end."""
    with PythonTool(backend=backend, cell_timeout_s=0.3, output_chars=2000, allow_weak_isolation=True) as tool:
        for code in ENDLESS.values():
            result, _ = tool.new().step(code)
            assert result.status == "timeout", code
            assert result.text.startswith("start"), code
            assert "\nTimeoutError: the cell ran longer than 0.3 s" in result.text, code


# -- the screen --------------------------------------------------------------------------------------------------------


def test_a_screen_keeps_both_ends_of_whatever_is_written() -> None:
    """Head and tail are right for writes of every size, and the count is of all bytes."""
    rng = random.Random(0)
    for _ in range(400):
        half = rng.choice([1, 2, 7, 64])
        screen, memory, written = Screen(half), bytearray(memory_size(half)), b""
        screen.open(memory)
        for _ in range(rng.randrange(10)):
            size = rng.choice([0, 1, half - 1, half, half + 1, 2 * half, rng.randrange(5 * half)])
            piece = bytes(rng.choice(b"abc\n") for _ in range(size))
            assert screen.write(rng.choice([bytes, bytearray, memoryview])(piece)) == size
            written += piece
        assert screen.is_at_line_start == (written == b"" or written.endswith(b"\n"))
        assert HEADER.unpack_from(memory) == (len(written),)
        text, is_cut = read_screen(bytes(memory), half, 10**6)
        if len(written) <= 2 * half:
            assert (text, is_cut) == (written.decode(), False)
        else:
            assert is_cut and text.startswith(written[:half].decode()) and text.endswith(written[-half:].decode())


def test_a_screen_is_read_whatever_stands_in_it() -> None:
    """The memory belongs to the cell, so its count and its bytes may be anything."""
    rng = random.Random(0)
    for _ in range(300):
        half = rng.choice([1, 50])
        text, _ = read_screen(rng.randbytes(memory_size(half)), half, 40)
        assert len(text) < 40 + 80
    text, is_cut = read_screen(b"\xff" * memory_size(50), 50, 40)
    assert is_cut and "omitted" in text


def test_the_interpreter_runs_without_what_only_linux_has() -> None:
    """Cells run in memory of the process itself, with none of the modules that some system lacks."""
    program = """
        import sys, types
        for name in ("fcntl", "resource", "posix_ipc", "pwd", "grp", "termios"):
            sys.modules[name] = None
        name = ""
        for part in "trace_gym envs math python_tool".split():
            name = f"{name}.{part}".strip(".")
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [sys.argv[1]]
        from trace_gym.envs.math.python_tool.interpreter import Interpreter
        from trace_gym.envs.math.python_tool.screen import memory_size, read_screen
        out, interpreter, shown = sys.stdout, Interpreter(100), []
        for number, code in enumerate(("print('one')\\n1 + 1", "1 / 0", "open('f', 'w')"), 1):
            memory = bytearray(memory_size(100))
            shown.append((interpreter.run(code, number, memory), *read_screen(bytes(memory), 100, 150)))
        print(shown, file=out)
    """
    folder = Path(__file__).resolve().parents[2] / "envs" / "math" / "python_tool"
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "('ok', 'one\\n2\\n', False)" in run.stdout
    assert "ZeroDivisionError" in run.stdout and "files cannot be written here" in run.stdout
