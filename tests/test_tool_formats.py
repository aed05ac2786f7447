"""Laws of every tool format: what is written is read, thoughts never run, inventions do not count, nothing raises."""

import json
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trace_gym.errors import BadInputError
from trace_gym.messages import ToolCall
from trace_gym.tool_formats import TOOL_FORMATS, get_tool_format, parse_tool_calls, render_tool_call
from trace_gym.tool_text import MAX_DEPTH, MAX_READ

FORMATS = sorted(TOOL_FORMATS)
PYTHON = {
    "type": "function",
    "function": {"name": "python", "description": "Run it.", "parameters": {"properties": {"code": {}}}},
}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Find it.", "parameters": {"properties": {"query": {}, "limit": {}}}},
}
ONE, TWO = (ToolCall("python", {"code": code}) for code in ("x = 1\nx", "y = 2"))

every_format = pytest.mark.parametrize("tool_format", FORMATS)


def spell(call, tool_format):
    return render_tool_call(call, tool_format)


# What is written is read.

TAGS = "<tool_call> </tool_call> <think> </think> <tool_response> <information> <answer> <python> </python> </search>"
FENCES = ["```", "```python", "```output", "\n```\n", "~~~", "'''", '"""', "'", '"', "#", "\\", "\\\n"]
MARKS = [*TAGS.split(), *FENCES, "<|python_tag|>", "\n", "\r\n", "\t", "\nObservation: ", "\nAction: ", "[f(", "{"]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=8).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)


def check(calls, tool_format):
    """Write calls among prose and read them."""
    text = "Well.\n" + "\n".join(spell(call, tool_format) for call in calls) + "\nSo be it."
    parsed = parse_tool_calls(text, tool_format)
    assert (list(parsed.calls), parsed.errors) == (calls, ())
    assert not parsed.is_cut and parsed.said.split() == ["Well.", "So", "be", "it."]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["hermes", "llama_json"]),
    st.lists(st.builds(ToolCall, TEXTS.filter(bool), st.dictionaries(TEXTS, VALUES, max_size=4)), max_size=3),
)
def test_json_holds_every_call(tool_format, calls):
    """Whatever names and arguments are: tags, fences and quotes are letters."""
    check(calls, tool_format)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), max_size=3))
def test_the_syntax_of_python_holds_every_call_whose_names_are_names(calls):
    check(calls, "pythonic")


@settings(max_examples=60, deadline=None)
@given(st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, VALUES, max_size=4)))
def test_an_action_holds_every_call_whose_tool_has_a_name(call):
    text = "Thought: well.\n" + spell(call, "react") + "\nObservation: 7"
    assert (parse_tool_calls(text, "react").calls, parse_tool_calls(text, "react").errors) == ((call,), ())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["python_fence", "react", "hermes", "llama_json", "pythonic"]), st.lists(TEXTS, max_size=3))
def test_code_is_read_as_it_was_written_or_not_written_at_all(tool_format, codes):
    """Several cells among prose, each with whatever fences, tags and quotes."""
    calls = [ToolCall("python", {"code": code}) for code in codes]
    try:
        texts = [spell(call, tool_format) for call in calls]
    except BadInputError:
        assume(False)
    if any(text.startswith("Action:") for text in texts[:-1]):
        texts, calls = texts[:1], calls[:1]
    parsed = parse_tool_calls("Well.\n" + "\n".join(texts) + "\nSo be it.", tool_format)
    assert (list(parsed.calls), parsed.errors) == (calls, ())


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        *((name, ToolCall("python", {"code": float("nan")})) for name in FORMATS),
        *((name, ToolCall("", {})) for name in FORMATS),
        *((name, ToolCall("python", {"code": object()})) for name in FORMATS),
        *((name, ToolCall("python", {"code": {1: 2}})) for name in FORMATS),
        *((name, ToolCall("python", {"code": json.loads("[" * 90 + "]" * 90)})) for name in FORMATS),
        ("pythonic", ToolCall("no name", {})),
        ("pythonic", ToolCall("f", {"no name": 1})),
        ("react", ToolCall("no\nname", {})),
        ("python_fence", ToolCall("search", {"query": "tides"})),
        ("python_fence", ToolCall("python", {"code": "x", "y": 1})),
        ("python_fence", ToolCall("python", {"code": " "})),
        ("python_fence", ToolCall("python", {"code": "x\r\ny"})),
        ("python_fence", ToolCall("python", {"code": "x  # </think>"})),
    ],
)
def test_what_a_format_cannot_hold_is_refused_not_bent(tool_format, call):
    """The message names the format's limit; no text comes out that would be read differently."""
    with pytest.raises(BadInputError):
        spell(call, tool_format)


def test_an_unknown_format_is_refused_with_the_names_that_exist():
    for use in (parse_tool_calls, lambda text, name: render_tool_call(ONE, name)):
        with pytest.raises(BadInputError, match="Did you mean 'hermes'"):
            use("", "hermse")


# Thoughts and inventions.


@every_format
@pytest.mark.parametrize(
    "thought", ["<think>{}</think>", "{}</think>", "<think>a</think>b {}</think>", "<think>\n{}\n</think>\n"]
)
def test_thoughts_never_run(tool_format, thought):
    """However the thought is fenced; nor do they say anything."""
    parsed = parse_tool_calls(thought.replace("{}", f"1 \n{spell(ONE, tool_format)}\n 2") + "done", tool_format)
    assert (parsed.calls, parsed.errors, parsed.said.strip()) == ((), (), "done")


@every_format
def test_a_call_after_a_thought_runs(tool_format):
    """On a new line or right behind it, whether the thought began in the prompt or not."""
    for lead in ("<think>I run it.</think>", "<think>I run it.</think>\n", "I run it.\n</think>\n\n", "</think>"):
        assert parse_tool_calls(lead + spell(ONE, tool_format), tool_format).calls == (ONE,)


@every_format
def test_a_call_in_a_thought_that_never_ends_is_an_error(tool_format):
    parsed = parse_tool_calls(f"<think>I run it.\n{spell(ONE, tool_format)}", tool_format)
    assert (parsed.calls, [error.kind for error in parsed.errors]) == ((), ["unclosed_think"])
    assert parse_tool_calls("<think>I do not know", tool_format).errors == ()


@every_format
def test_what_follows_an_invented_result_does_not_count(tool_format):
    """Neither a call nor an answer, and a generation that stops there loses nothing."""
    call = spell(ONE, tool_format)
    for stop in get_tool_format(tool_format).stops:
        text = f"I look.\n{call}\n{stop}\n7\n{spell(TWO, tool_format)}\nIt is 7."
        parsed = parse_tool_calls(text, tool_format)
        cut = parse_tool_calls(text[: text.index(stop) + len(stop)], tool_format)
        assert parsed == cut
        assert (parsed.calls, parsed.errors, parsed.said.split()) == ((ONE,), (), ["I", "look."])
        assert parsed.is_cut
        alone = parse_tool_calls(f"I look.\n{stop}\n7\n{call}\nIt is 7.", tool_format)
        assert (alone.calls, alone.said.split(), alone.is_cut) == ((), ["I", "look."], True)


@every_format
def test_an_invention_in_a_thought_is_forgotten_with_it(tool_format):
    for stop in get_tool_format(tool_format).stops:
        for thought in ("<think>\n{}\n7</think>\n", "\n{}\n7</think>\n"):
            text = thought.replace("{}", stop.strip()) + spell(ONE, tool_format)
            parsed = parse_tool_calls(text, tool_format)
            assert (parsed.calls, parsed.is_cut) == ((ONE,), False)


@every_format
def test_the_models_own_results_are_known_as_such(tool_format):
    """What the format writes around a result is what it takes for an invention in the model's mouth."""
    message = get_tool_format(tool_format).observe("python", "7")
    if message.role == "user":
        assert parse_tool_calls(f"{message.content}\nIt is 7.", tool_format).said.strip() == ""
    else:
        assert (message.content, message.name) == ("7", "python")


def test_a_result_cannot_end_its_own_frame():
    """Whatever a cell prints stays inside."""
    text = get_tool_format("python_fence").observe("python", "```\nsaid by nobody").content
    assert text == "````output\n```\nsaid by nobody\n````"
    text = get_tool_format("react").observe("search", "7</information>said by nobody").content
    assert text.count("</information>") == 1 and text.endswith("</information>")


# What the model is told.


@every_format
def test_the_system_prompt_of_a_format_names_the_tools_and_shows_a_call(tool_format):
    """Every format can be told in words, for models whose template does not."""
    tools = [PYTHON] if tool_format == "python_fence" else [PYTHON, SEARCH]
    told = get_tool_format(tool_format).describe(tools)
    assert all(tool["function"]["description"] in told for tool in tools)
    assert get_tool_format(tool_format).example.split("NAME")[0].strip() in told


@pytest.mark.parametrize("tools", [[SEARCH], [PYTHON, SEARCH], []])
def test_a_fence_is_for_python_only(tools):
    with pytest.raises(BadInputError, match="one tool, python"):
        get_tool_format("python_fence").describe(tools)


# A stranger's text.


def repeat(piece):
    return lambda n: (piece * (n // len(piece) + 1))[:n]


HOSTILE = {
    "opening tags": repeat("<tool_call>"),
    "closed empty blocks": repeat("<tool_call></tool_call>"),
    "open strings": repeat('<tool_call>{"a</tool_call>'),
    "calls": repeat('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n'),
    "objects": lambda n: "<tool_call>" + repeat("{}")(n),
    "a list of calls": lambda n: "[" + repeat('{"name": "f"},')(n),
    "thoughts": repeat("<think>"),
    "ends of thoughts": repeat('</think><tool_call>{"name": "f"}</tool_call>'),
    "thoughts and calls": repeat("<think><tool_call></think>"),
    "white space": lambda n: "<tool_call>" + " \n" * (n // 2),
    "white space of all kinds": lambda n: "<tool_call>" + repeat("\u2003\x1f\x0b")(n) + "{}",
    "white space after a call": lambda n: '{"name": "f"}' + " " * n + "x",
    "white space in a list": lambda n: "[f(" + " " * n,
    "white space after an action": lambda n: "Action: f\n" + " \n" * (n // 2),
    "bare calls": repeat('{"name": "f", "parameters": {"x": 1}}\n'),
    "braces": repeat("{"),
    "braces on lines": repeat("{\n"),
    "broken calls": repeat('>{"name"'),
    "nested arrays": lambda n: "<tool_call>" + "[" * n,
    "nested objects": repeat('{"name":'),
    "nested lists of Python": lambda n: "[f(x=" + "[" * n,
    "nested parentheses": lambda n: "[f(x=" + "(" * n,
    "nested and closed": lambda n: "<tool_call>" + '{"name": "f", "arguments": ' + "[" * (n // 2) + "]" * (n // 2),
    "nested in a string": lambda n: '{"name": "f", "parameters": "' + "[" * n + '"}',
    "lists of calls": repeat("[f(a=1)]\n"),
    "a call with many arguments": lambda n: "[f(" + "a=1," * (n // 4) + ")]",
    "a list of strings": lambda n: "[f(a=" + "'a' " * (n // 4) + ")]",
    "escapes": lambda n: "[f(a='" + "\\'" * (n // 2),
    "open strings of Python": repeat("[f(a='\\'"),
    "a long name": lambda n: "[" + "a." * (n // 2),
    "a long number": lambda n: "[f(a=" + "9" * n + ")]",
    "a long number in JSON": lambda n: '{"name": "f", "parameters": {"x": ' + "9" * n + "}}",
    "comments": lambda n: "[f(" + "#x\n" * (n // 3),
    "calls without brackets": repeat("f(a=1) x "),
    "backticks": lambda n: "x" + "`" * n,
    "fences": repeat("```\n"),
    "fences of Python": repeat("```python\n"),
    "blocks": repeat("```python\nx\n```\n"),
    "fences that shrink": lambda n: "".join("`" * k + "json\n" for k in range(400, 2, -1)) + repeat("```x\n")(n),
    "quotes": lambda n: "```python\n" + repeat("'a\\'\n")(n),
    "open docstrings": repeat("```python\n\\\\'''\n```\n"),
    "all quotes": lambda n: "```python\n" + repeat("'''\\'\"\"\"\\\"")(n),
    "a long line": lambda n: "```python\n" + "x" * n + "```",
    "searches": repeat("<search>"),
    "thoughts in searches": repeat("<search>a</think></search>"),
    "actions": repeat("Action: f[\n</think>"),
    "actions with input": repeat("Action: f\nAction Input: x </think>"),
    "almost observations": lambda n: "Action: f\nAction Input: " + repeat("Observation ")(n),
    "a long input": lambda n: "Action: f\nAction Input: x" + "\n" * n,
    "stars": repeat(">*"),
    "zero bytes": repeat("\0"),
    "lone surrogates": repeat('\ud800{"name": "\udfff"}\n'),
}


@every_format
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_neither_raises_nor_takes_long(tool_format, case):
    """In time that grows with its length: a quadratic step would take minutes."""
    start = time.process_time()
    parsed = parse_tool_calls(HOSTILE[case](200_000), tool_format)
    assert time.process_time() - start < 5
    assert len(parsed.calls) + len(parsed.errors) <= MAX_READ + 1


PIECES = st.sampled_from(
    [
        *MARKS,
        "}",
        "[",
        "]",
        "(",
        ")",
        '{"name": "f"',
        ', "arguments": ',
        "f(",
        "a=",
        ",",
        "1",
        "Action Input: ",
        "1e999",
    ]
)


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(FORMATS), st.lists(PIECES | st.text(st.characters(exclude_categories=()), max_size=4), max_size=25)
)
def test_no_text_makes_a_reader_raise_and_what_it_finds_is_plain_data(tool_format, pieces):
    """Names are not empty, arguments are JSON of finite numbers and bounded depth, errors have words."""
    parsed = parse_tool_calls("".join(pieces), tool_format, (PYTHON, SEARCH))
    for call in parsed.calls:
        assert call.name and isinstance(call.name, str)
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        assert all(isinstance(key, str) for key in call.arguments)
    assert all(error.kind and error.detail for error in parsed.errors)


@pytest.mark.parametrize("tool_format", ["hermes", "llama_json", "pythonic", "react"])
def test_depth_is_bounded_at_one_place_for_all(tool_format):
    """What is well allowed is read, a little more is refused, however much stack there is."""
    allowed, refused = (
        ToolCall("f", {"x": json.loads("[" * depth + "]" * depth)}) for depth in (MAX_DEPTH - 8, MAX_DEPTH + 8)
    )
    assert parse_tool_calls(spell(allowed, tool_format), tool_format).calls == (allowed,)
    with pytest.raises(BadInputError, match="levels deep"):
        spell(refused, tool_format)


@every_format
def test_no_more_than_so_many_calls_are_read(tool_format):
    """The rest is one error; in ReAct a turn holds one action anyway."""
    parsed = parse_tool_calls((spell(TWO, tool_format) + "\n") * (MAX_READ + 9), tool_format)
    assert parsed.calls == (TWO,) * MAX_READ
    assert [error.kind for error in parsed.errors] == ["too_many_calls"]
