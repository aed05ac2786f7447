"""Which kinds of state survive when a state is kept: 41 of them, by fork and by replay."""

from __future__ import annotations

import pytest

from trace_gym.envs.math import PythonTool
from trace_gym.envs.math.python_tool import capabilities

BACKENDS = [name for name in capabilities().backends if name != "monty"]

# name: what makes the state, what shows it. Each is deterministic, so one process that runs both is the measure.
KINDS = {
    "numbers": ("big = 7**300; ratio = 0.1 + 0.2", "big % 1009, ratio"),
    "text and bytes": ("text = 'ä' * 3; raw = bytearray(b'ab'); raw += b'c'", "text, raw"),
    "containers in one another": ("inner = [1]; outer = {'a': inner, 'b': (inner, {3})}", "inner.append(2), outer"),
    "a list in itself": ("loop = [1]; loop.append(loop)", "loop[1][1][0], loop[1] is loop"),
    "order of a dictionary": ("order = {'z': 1, 'a': 2}; order['m'] = order.pop('z')", "list(order)"),
    "order of a set of text": ("words = {'pear', 'fig', 'kiwi', 'plum'}", "list(words)"),
    "a function": ("def twice(x):\n    return 2 * x", "twice(21)"),
    "a function that reads a global name": ("k = 1\ndef read_k():\n    return k\nk = 5", "read_k()"),
    "functions that share a counter": (
        "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n"
        "    def now():\n        return n\n    return up, now\nup, now = counter()\nup()",
        "up(), now()",
    ),
    "default values that were changed": (
        "def grow(seen=[]):\n    seen.append(len(seen))\n    return seen\ngrow()",
        "grow()",
    ),
    "a lambda in a dictionary": ("table = {'f': lambda x, y=3: x * y}", "table['f'](5)"),
    "a class and its instance": (
        "class Point:\n    n = 0\n    def __init__(self, x):\n        self.x = x\np = Point(2)",
        "p.x, Point.n, type(p) is Point, Point.__module__",
    ),
    "a class that was changed": (
        "class Shape:\n    pass\nShape.area = lambda self: 12\nshape = Shape()",
        "shape.area()",
    ),
    "inheritance and super": (
        "class Base:\n    def name(self):\n        return 'base'\n"
        "class Child(Base):\n    def name(self):\n        return super().name() + '+'\nchild = Child()",
        "child.name(), isinstance(child, Base)",
    ),
    "an exception type": (
        "class Odd(ValueError):\n    pass\nodd = Odd('three')",
        "repr(odd), issubclass(Odd, ValueError)",
    ),
    "a dataclass": ("from dataclasses import dataclass\n@dataclass\nclass Item:\n    a: int\nitem = Item(4)", "item"),
    "an enumeration": ("import enum\nclass Hue(enum.Enum):\n    RED = 1", "Hue.RED is Hue(1)"),
    "a generator half way": ("gen = (i * i for i in range(9)); next(gen); next(gen)", "next(gen)"),
    "a generator function that takes values": (
        "def echo():\n    got = 0\n    while True:\n        got = (yield got) or got\ne = echo(); next(e); e.send(7)",
        "next(e)",
    ),
    "an iterator half way": ("it = iter([1, 2, 3]); next(it)", "list(it)"),
    "itertools": (
        "import itertools\ncount = itertools.count(10, 5); next(count)\ncyc = itertools.cycle('ab'); next(cyc)",
        "next(count), next(cyc)",
    ),
    "a cache": (
        "import functools\n@functools.lru_cache\ndef slow(n):\n    return n\nslow(1); slow(1)",
        "slow.cache_info()",
    ),
    "a weak reference": (
        "import weakref\nclass Thing:\n    pass\nthing = Thing(); ref = weakref.ref(thing)",
        "ref() is thing",
    ),
    "a lock that is held": ("import threading\nlock = threading.Lock(); lock.acquire()", "lock.locked()"),
    "a heap and a deque": (
        "import heapq, collections\nheap = [3, 1, 2]; heapq.heapify(heap)\nd = collections.deque([1, 2], 2)",
        "heapq.heappop(heap), d.append(3), d",
    ),
    "decimal precision": ("import decimal\ndecimal.getcontext().prec = 7", "decimal.Decimal(1) / 3"),
    "fractions": ("from fractions import Fraction\nf = Fraction(3, 6)", "f + 1"),
    "the global random generators": (
        "import random\nimport numpy as np\nrandom.random(); np.random.rand()",
        "random.random(), float(np.random.rand())",
    ),
    "generators of random numbers": (
        "own = random.Random(3); own.random()\nrng = np.random.default_rng(4); rng.random()",
        "own.random(), float(rng.random()), float(np.random.default_rng().random())",
    ),
    "an array and a view of it": ("arr = np.arange(6.0); view = arr[::2]; view[0] = 9", "arr[0], view.base is arr"),
    "print options": ("np.set_printoptions(precision=2)", "print(np.array([1 / 3]))"),
    "sympy symbols and assumptions": (
        "import sympy as sp\nx = sp.Symbol('x', positive=True)",
        "sp.sqrt(x**2), x in {x}",
    ),
    "sympy expressions": ("expr = sp.integrate(x * sp.exp(-x), x)", "expr, expr.diff(x).simplify()"),
    "precision of mpmath": ("import mpmath\nmpmath.mp.dps = 30", "mpmath.mpf(1) / 3"),
    "the recursion limit": ("import sys\nsys.setrecursionlimit(2500)", "sys.getrecursionlimit()"),
    "a module that was patched": ("import math\nmath.tau = 6", "math.tau"),
    "a compiled pattern and a match": ("import re\nmatch = re.search(r'(b+)', 'abbc')", "match.group(1), match.span()"),
}
# Stored when the state was made, and what it is now. A replay makes them anew.
FLEETING = {
    "an address": "id(thing)",
    "the time": "stamp",
    "randomness from the system": "noise",
    "the id of the process": "os.getpid()",
}
SETUP = "\n".join(make for make, _ in KINDS.values())
PROBE = "\n".join(f"print({show}, flush=True)" if not show.startswith("print") else show for _, show in KINDS.values())
STAMP = "import os, time\nstamp = time.time_ns(); noise = os.urandom(8)"


@pytest.fixture(scope="module", params=BACKENDS)
def tool(request: pytest.FixtureRequest):
    with PythonTool(backend=request.param, cell_timeout_s=60, output_chars=20_000, allow_weak_isolation=True) as made:
        yield made


@pytest.mark.slow
def test_thirty_seven_kinds_of_state_are_kept_by_every_backend_of_full_python(tool: PythonTool) -> None:
    """A kept state goes on like a process that was never interrupted; a second time, too."""
    assert len(KINDS) == 37
    whole = tool.new(seed=1).step(f"{SETUP}\n{PROBE}")[0]
    assert whole.status == "ok", whole.text
    _, state = tool.new(seed=1).step(SETUP)
    expected = whole.text.splitlines()
    assert len(expected) == len(KINDS)
    for restored in (state, state, tool.load(state.to_bytes())):
        shown = restored.step(PROBE)[0].text.splitlines()
        lost = [name for name, before, after in zip(KINDS, expected, shown, strict=True) if before != after]
        assert not lost, lost


@pytest.mark.slow
def test_what_differs_between_two_processes_is_kept_as_far_as_the_backend_says(tool: PythonTool) -> None:
    """A fork keeps addresses, time and the system's randomness; a replay makes them anew; the process id goes."""
    now = f"[{', '.join(FLEETING.values())}]"
    _, state = tool.new().step(f"{STAMP}\nthing = [1]\nkept = {now}")
    first, again = (state.step("kept")[0].text for _ in range(2))
    assert (again == first) == (tool.snapshot == "exact")
    if tool.snapshot == "exact":
        assert state.step(f"[a == b for a, b in zip(kept, {now})]")[0].text == "[True, True, True, False]"
