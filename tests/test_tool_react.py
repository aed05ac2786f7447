"""Tool calls in the manner of ReAct: tags, and lines of thought, action and input."""

import pytest

from trace_gym.messages import ToolCall
from trace_gym.tool_formats import parse_tool_calls, render_tool_call

TOOLS = (
    {"type": "function", "function": {"name": "ask", "parameters": {"properties": {"question": {}, "topic": {}}}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"properties": {}}}},
)


def found(text, tools=()):
    parsed = parse_tool_calls(text, "react", tools)
    return list(parsed.calls), [error.kind for error in parsed.errors]


def call(name="search", /, **arguments):
    return ToolCall(name, arguments)


Q = [call(query="tides")]

READ = {
    # tags
    "a tag": ("<search>tides</search>", Q),
    "a tag after a thought": ("<think>Is it <search>no</search>?</think>\n<search> tides </search>", Q),
    "two tags": ("<search>tides</search> and <search>moon</search>", [*Q, call(query="moon")]),
    "code in a tag": ("<python>\n  if x:\n    y\n</python>", [call("python", code="  if x:\n    y")]),
    "a fence in a tag": ("<python>\n```python\nx\n```\n</python>", [call("python", code="```python\nx\n```")]),
    "a tag of nobody": ("<b>tides</b>", []),
    "a tag in a fence": ("For example\n```\n<search>tides</search>\n```\nwould do.", []),
    "a tag after the answer": ("<answer> 7 </answer> <search>tides</search>", []),
    "a tag before the answer": ("<search>tides</search> <answer> 7 </answer>", Q),
    "a tag in a thought that began in the prompt": ("Maybe <search>tides</search>?</think> It is 7.", []),
    "a tag in which a thought ends": ("Maybe <search>no</think><search>tides</search>", Q),
    # actions
    "an action": ('Thought: look\nAction: search\nAction Input: {"query": "tides"}', Q),
    "an action after a thought": ('<think>look</think>Action: search\nAction Input: {"query": "tides"}', Q),
    "an action with plain input": ("Action: search\nAction Input: tides", Q),
    "an action with plain input and more": ("Action: search\nAction Input: tides\nThought: then", Q),
    "plain input before an observation in the line": ("Action: search\nAction Input: tides Observation: 7", Q),
    "plain input over lines": (
        "Action: python\nAction Input: x = 1\nx\nObservation: 1",
        [call("python", code="x = 1\nx")],
    ),
    "input in a fence": ("Action: python\nAction Input:\n```python\nx\n```", [call("python", code="x")]),
    "JSON in a fence": ('Action: search\nAction Input:\n```json\n{"query": "tides"}\n```', Q),
    "a dict as code in a fence": (
        'Action: python\nAction Input:\n```\n{"a": 1}["a"]\n```',
        [call("python", code='{"a": 1}["a"]')],
    ),
    "JSON over lines": ('Action: search\nAction Input: {\n  "query": "tides"\n}\n', Q),
    "JSON with an observation inside": (
        'Action: search\nAction Input: {"query": "a\nObservation: b </think>"}',
        [call(query="a\nObservation: b </think>")],
    ),
    "input in the same line": ('Action: search Action Input: {"query": "tides"}', Q),
    "brackets": ("Action: search[tides]", Q),
    "numbers and brackets": ("Thought 3: so\nAction 3: search[tides] Observation 3: 7", Q),
    "numbers and input": ('Action 1: search\nAction Input 1: {"query": "tides"}', Q),
    "brackets in brackets": ("Action: search[a[0] of b]", [call(query="a[0] of b")]),
    "JSON in brackets": ('Action: search[{"query": "tides"}]', Q),
    "marks around the name": ("**Action:** `search`\n**Action Input:** tides", Q),
    "no input": ("Action: list_files\n", [call("list_files")]),
    "a tool nobody knows": ("Action: find.it\nAction Input: x", [call("find.it", input="x")]),
    "carriage returns": ('Action: search\r\nAction Input: {"query": "tides"}\r\n', Q),
    "two actions": ("Action: search[tides]\nAction: search[moon]", Q),
    "two rounds": ("Action: search[tides]\nObservation: 7\nAction: search[moon]", Q),
    "a tag, then an action": ("<search>tides</search>\nAction: python[x]", [*Q, call("python", code="x")]),
    "an action, then a tag": ("Action: search[tides]\n<search>moon</search>", Q),
    "an action after the answer": ("Final Answer: 7\nAction: search[tides]", []),
    "an action after an observation": ("Observation: 7\nAction: search[tides]", []),
    "an action in a fence": ("```\nAction: search[tides]\n```\nis how.", []),
    "an action in a fence, then one": ("```\nAction: search[no]\n```\nAction: search[tides]", Q),
    "an action in a fence that is left open": ("Like this:\n```\nAction: search[tides]", []),
    "finish": ("Action 2: Finish[7]", []),
    "an action in a thought that began in the prompt": ("Action: search[tides]\n</think>\nFinal Answer: 7", []),
    "an answer": ("Thought: I know\nFinal Answer: 7", []),
    "words only": ("The action is over; the observation was good.", []),
}

REFUSED = {
    "an open tag": ("<search>tides", "unclosed_tag"),
    "a tag closed by another": ("<search>tides</python>", "unclosed_tag"),
    "input on the line of the action": ('Action: search ({"query": "tides"})', "bad_action_format"),
    "words on the line of the action": ("Action: search for tides", "bad_action_format"),
    "no action": ("Action:\nsearch", "bad_action_format"),
    "an open bracket": ("Action: search[tides\n]", "bad_action_format"),
    "broken JSON": ('Action: search\nAction Input: {"query" "tides"}', "invalid_json"),
    "a key given twice": ('Action: search\nAction Input: {"query": "a", "query": "b"}', "invalid_json"),
    "not a number": ('Action: search\nAction Input: {"query": NaN}', "invalid_json"),
    "a thought that never ends": ("<think><search>tides</search>", "unclosed_think"),
}


@pytest.mark.parametrize("case", READ)
def test_tags_and_the_first_action_are_calls(case):
    text, calls = READ[case]
    assert found(text) == (calls, [])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_an_error_and_no_call(case):
    text, kind = REFUSED[case]
    assert found(text) == ([], [kind])
    assert parse_tool_calls(text, "react").errors[0].detail


def test_the_tools_say_which_tags_there_are_and_what_they_hold():
    """The text goes to the first parameter; a tool without any has no tag."""
    text = "<ask>why?</ask><stop></stop><search>tides</search>"
    assert found(text, TOOLS) == ([call("ask", question="why?")], [])
    assert found("Action: ask[why?]", TOOLS) == ([call("ask", question="why?")], [])


def test_the_answer_is_part_of_what_was_said():
    """Of whichever style."""
    for text in ("<answer> 7 </answer>", "Final Answer: 7", "Action 2: Finish[7]"):
        assert parse_tool_calls(f"<think>5</think>So\n{text}", "react").said == f"So\n{text}"
    assert "7" not in parse_tool_calls("Thought: so\nObservation: <answer>7</answer>", "react").said


def test_a_call_is_written_as_a_tag_where_one_text_says_it_all():
    """Otherwise as an action, which holds anything JSON holds."""
    assert render_tool_call(call(query="K2 height"), "react") == "<search> K2 height </search>"
    assert render_tool_call(call("python", code="x"), "react") == "<python>\nx\n</python>"
    assert render_tool_call(call("python", code="'</python>'"), "react").startswith("Action: python\nAction Input: {")
    assert render_tool_call(call("ask", question="why?"), "react", TOOLS) == "<ask> why? </ask>"
    assert render_tool_call(call("ask", topic="why?"), "react", TOOLS) == 'Action: ask\nAction Input: {"topic": "why?"}'
    assert render_tool_call(call("stop"), "react", TOOLS) == "Action: stop\nAction Input: {}"
