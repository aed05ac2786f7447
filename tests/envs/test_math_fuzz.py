"""MathCode against anything at all: no action raises, and none leaves anything behind.

A thousand actions by default; the whole measure is ``TRACE_GYM_FUZZ_ACTIONS=100000 pytest test_math_fuzz.py -s``.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from process_tree import descendants, open_files

from trace_gym.envs.math.env import PYTHON_TOOL, MathCodeEnv
from trace_gym.envs.math.grading import close_grader
from trace_gym.errors import BadInputError
from trace_gym.messages import ToolCall
from trace_gym.tool_formats import TOOL_FORMATS, render_tool_call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes and descriptors in /proc")
pytest.importorskip("sympy")

NUM_ACTIONS = int(os.environ.get("TRACE_GYM_FUZZ_ACTIONS", "1000"))
MEGABYTE = 1_000_000
MARKUP = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "<|python_tag|>", "<|im_start|>"),
    *("```python\n", "```output\n", "```", "~~~~", "[python(code=", "[python(", ")]", "Action: python\n"),
    *("Action Input: ", "<python>", "</python>", "<search>", "<information>", "</information>"),
    *('{"name": "python", "arguments": {"code": "', '"}}', '{"name": ', '"parameters": ', "{", "}", "[", "]", "(", ")"),
    *(
        '"',
        "'",
        '"""',
        "\\",
        "\n",
        "\r",
        "\0",
        " ",
        "#",
        ",",
        "=",
        "print(1)",
        "\\boxed{",
        "\\boxed",
        "\\frac{1}{",
        "$",
    ),
    *(
        "^",
        "9^9^9^9",
        "\\sqrt[",
        "\\left(",
        "\\begin{pmatrix}",
        "&",
        "10^10^10!",
        "%",
        "x",
        "1/0",
        "1e999",
        "\ud800",
        "é",
    ),
)
CELLS = (
    *("print(1)", "x = 1\nx", "1 / 0", "exit()", "import sys\nsys.exit('no')", "raise KeyboardInterrupt", "input()"),
    *("import os\nos._exit(7)", "import os\nos.fork()", "import os\nos.closerange(0, 99)", "import os\nos.abort()"),
    *(
        "import ctypes\nctypes.CDLL(None).fork()",
        "import ctypes\nctypes.string_at(1)",
        "open('f', 'w')",
        "!ls",
        "'\ud800'",
    ),
    *("print('y' * 10**7)", "'é' * 10**6", "2 ** 10**5", "'a' * 10**11", "def f(): f()\nf()", "v = []\nv.append(v)\nv"),
    *("import sys\nsys.stdout.write('\\ud800\\0\\x1b[1m\\r')", "import sys\nsys.stdout = 5", "__builtins__ = 3", "\0"),
    *(
        "import builtins\ndel builtins.print, builtins.len",
        "class A:\n  def __repr__(s): raise s\nA()",
        "return",
        "-" * 9999,
    ),
    *("class E(Exception):\n  def __str__(s): return 3\nraise E", "raise ExceptionGroup('g', [ValueError()] * 99)"),
    *("import os\nos.write(3, b'[' * 9999)", "import threading\nthreading.Thread(target=print).start()", "x = '''"),
    *(
        "import random\nrandom.random()",
        "import gc\ngc.get_objects()[:3000]",
        "globals().clear()",
        "print(end='\\x00' * 99)",
    ),
)
ENDLESS = ("while True: pass", "print('a')\nimport time\ntime.sleep(99)", "10 ** 10 ** 10", "sum(iter(int, 1))")


def bytes_as_text(rng: random.Random, tool_format: str) -> str:
    encoding, errors = rng.choice(
        [("utf-8", "replace"), ("latin-1", "strict"), ("utf-8", "surrogateescape"), ("utf-16-le", "surrogatepass")]
    )
    return rng.randbytes(2 * rng.randrange(200)).decode(encoding, errors)


def markup(rng: random.Random, tool_format: str) -> str:
    return "".join(rng.choice(MARKUP) for _ in range(rng.randrange(40)))


def call(rng: random.Random, tool_format: str, cells: tuple[str, ...] = CELLS) -> str:
    cell = rng.choice(cells)
    try:
        return render_tool_call(ToolCall("python", {"code": cell}), tool_format, [PYTHON_TOOL])
    except BadInputError:  # this format has no words for it
        return f"<tool_call>{cell}</tool_call>"


def calls(rng: random.Random, tool_format: str) -> str:
    pieces = [rng.choice([call, markup, bytes_as_text])(rng, tool_format) for _ in range(rng.randrange(2, 9))]
    return rng.choice(["", "\n", "<think>"]).join(pieces)


def torn(rng: random.Random, tool_format: str) -> str:
    """A call that is cut off, or in which characters are missing, doubled or exchanged."""
    text = call(rng, tool_format)
    if rng.random() < 0.5:
        return text[: rng.randrange(len(text) + 1)]
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(MARKUP) + text[at + rng.randrange(3) :]
    return text


def nested(rng: random.Random, tool_format: str) -> str:
    """Brackets inside of brackets, where a call, its arguments, a cell or an answer may stand."""
    depth = rng.choice([70, 500, 20_000])
    opening, closing = rng.choice(["[]", "{}", "()", ('{"a":', "}"), ("\\frac{", "}{2}"), ("\\sqrt{", "}"), ("-", "")])
    inner = opening * depth + "1" + closing * (depth if rng.random() < 0.7 else 0)
    before, after = rng.choice(
        [
            ("", ""),
            ("\\boxed{", "}"),
            ("<tool_call>", "</tool_call>"),
            ('<tool_call>{"name": "python", "arguments": {"code": ', "}}</tool_call>"),
            ('{"name": "python", "parameters": {"code": ', "}}"),
            ("[python(code=", ")]"),
            ("```python\n", "\n```"),
            ("<python>", "</python>"),
        ]
    )
    return before + inner + after


def answer(rng: random.Random, tool_format: str) -> str:
    pieces = [rng.choice([*MARKUP, "1", "2", "+", "/", "\\pi", "x"]) for _ in range(rng.randrange(6))]
    return f"So \\boxed{{{''.join(pieces)}{rng.choice(['}', '}', '', '}}'])}"


def huge(rng: random.Random, tool_format: str) -> str:
    """A megabyte of one thing."""
    piece = rng.choice(
        [*MARKUP, "a", "1", "1+", "\\boxed{1}", "<think>a</think>", bytes_as_text(rng, tool_format) or "b"]
    )
    text = piece * (MEGABYTE // len(piece))
    return rng.choice(["", "\\boxed{", "<tool_call>", "```python\n", "[python(code='", "<python>"]) + text


def endless(rng: random.Random, tool_format: str) -> str:
    return call(rng, tool_format, ENDLESS)


KINDS: dict[Callable[[random.Random, str], str], float] = {
    bytes_as_text: 15,
    markup: 20,
    call: 8,
    calls: 8,
    torn: 15,
    nested: 10,
    answer: 15,
    huge: 1,
    endless: 0.05,
}


def play(env: MathCodeEnv, action: str, rng: random.Random, met: Counter[str]) -> None:
    """Take a step, hold what comes to the laws of an environment, and count what it was."""
    observation, reward, terminated, truncated, info = env.step(action)
    assert isinstance(observation, str) and len(observation) <= 16_384
    observation.encode()
    if math.isnan(reward):
        assert info["failure"]["kind"] == "ungradable" and truncated
    else:
        assert reward in (0.0, 1.0) and "failure" not in info
        assert not reward or terminated
    for message in info["messages"]:
        str(message["content"]).encode()
    if info["tool_calls"]:
        met["cell failed" if info["tool_errors"] else "cell ran"] += 1
        met[env.tool_format] += 1
    met[info.get("action_error") or info.get("outcome", {}).get("verdict") or "no error"] += 1
    if rng.random() < 0.02:
        env.set_state(env.get_state())
    if terminated or truncated or rng.random() < 0.05:
        env.reset(seed=rng.randrange(10**6))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(300 + NUM_ACTIONS / 10)
def test_no_action_raises_and_none_leaves_anything_behind() -> None:
    """Every answer obeys the interface; then no process and no descriptor is left, and memory has not grown."""
    close_grader()
    gc.collect()
    files, before = open_files(), descendants()
    envs = [
        MathCodeEnv(tool_format=name, cell_timeout_s=0.3, max_action_chars=limit)
        for name in TOOL_FORMATS
        for limit in (16_384, 2 * MEGABYTE)
    ]
    rng = random.Random(0)
    for env in envs:
        env.reset(seed=0)
    met: Counter[str] = Counter()
    slowest: Counter[str] = Counter()
    sizes: list[int] = []
    for number in range(NUM_ACTIONS):
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        env = rng.choice(envs)
        action = kind(rng, env.tool_format)
        try:
            began = time.monotonic()
            play(env, action, rng, met)
        except Exception as error:
            error.add_note(f"action {number}, {kind.__name__}, {env.tool_format}: {action[:2000]!r}")
            raise
        name = f"{kind.__name__} {env.tool_format}"
        slowest[name] = max(slowest[name], time.monotonic() - began)
        if number % max(1, NUM_ACTIONS // 20) == 0:
            gc.collect()
            sizes.append(resident_bytes())
            assert len(descendants() - before) < 2 * 512
    print(f"\nresident MB: {[size // MEGABYTE for size in sizes]}")
    print("slowest:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest.most_common(8)))
    print("met:", dict(met.most_common()))
    assert {*TOOL_FORMATS, "cell ran", "cell failed", "wrong", "no_action", "invalid_json"} <= set(met)
    # The first quarter fills caches of a fixed size.
    assert max(sizes[-5:]) - max(sizes[:8]) < 30 * MEGABYTE
    for env in envs:
        env.close()
    close_grader()
    end = time.monotonic() + 5
    while descendants() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not descendants() - before
    assert open_files() <= files
