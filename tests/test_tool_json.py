"""Tool calls as JSON, in hermes blocks and as Llama writes them, from hands that make mistakes."""

import json

import pytest

from trace_gym.messages import ToolCall
from trace_gym.tool_formats import parse_tool_calls


def block(payload):
    """Return a call block with a payload, a string or something to write as JSON."""
    return f"<tool_call>\n{payload if isinstance(payload, str) else json.dumps(payload)}\n</tool_call>"


def call(name="add", **arguments):
    return ToolCall(name, arguments)


def found(text, tool_format="hermes"):
    """Return the calls and the kinds of error."""
    parsed = parse_tool_calls(text, tool_format)
    return list(parsed.calls), [error.kind for error in parsed.errors]


ONE = block({"name": "add", "arguments": {"x": 1}})

READ = {
    "a plain call": (ONE, [call(x=1)]),
    "all on one line": (ONE.replace("\n", ""), [call(x=1)]),
    "with text around it": (f"First I add.\n{ONE}\nThen I look.", [call(x=1)]),
    "two blocks": (ONE + block({"name": "sub", "arguments": {}}), [call(x=1), call("sub")]),
    "two objects in one block": (block('{"name": "add"}\n{"name": "sub"}'), [call(), call("sub")]),
    "two objects with a comma": (block('{"name": "add"}, {"name": "sub"}'), [call(), call("sub")]),
    "two objects with a semicolon": (block('{"name": "add"}; {"name": "sub"}'), [call(), call("sub")]),
    "a list of objects": (block([{"name": "add"}, {"name": "sub"}]), [call(), call("sub")]),
    "no arguments": (block({"name": "stop"}), [call("stop")]),
    "arguments null": (block({"name": "stop", "arguments": None}), [call("stop")]),
    "arguments an empty string": (block({"name": "stop", "arguments": ""}), [call("stop")]),
    "arguments under another common name": (block({"name": "add", "parameters": {"x": 2}}), [call(x=2)]),
    "arguments as JSON in a string": (block({"name": "add", "arguments": '{"x": 3}'}), [call(x=3)]),
    "a type and an id beside the name": (block({"type": "function", "id": "7", "name": "add"}), [call()]),
    "the closing tag inside a string": (
        block({"name": "add", "arguments": {"x": "say </tool_call> now"}}),
        [call(x="say </tool_call> now")],
    ),
    "the opening tag inside a string": (
        block({"name": "add", "arguments": {"x": "<tool_call>{}"}}),
        [call(x="<tool_call>{}")],
    ),
    "a thought tag inside a string": (block({"name": "add", "arguments": {"x": "</think>"}}), [call(x="</think>")]),
    "a result's tag inside a string": (
        block({"name": "add", "arguments": {"x": "<tool_response>"}}),
        [call(x="<tool_response>")],
    ),
    "a fence inside a string": (block({"name": "add", "arguments": {"x": "```\n"}}), [call(x="```\n")]),
    "a fence around the object": (block('```json\n{"name": "add"}\n```'), [call()]),
    "no closing tag": (ONE.removesuffix("\n</tool_call>"), [call(x=1)]),
    "no closing tag and words after it": (ONE.removesuffix("</tool_call>") + "That is all.", [call(x=1)]),
    "a damaged closing tag": (ONE.removesuffix("call>"), [call(x=1)]),
    "a brace too many": (block('{"name": "add", "arguments": {"x": 1}}}'), [call(x=1)]),
    "real line breaks and tabs inside a string": (
        block('{"name": "add", "arguments": {"x": "if 1:\n\ty = 2"}}'),
        [call(x="if 1:\n\ty = 2")],
    ),
    "brackets and commas inside a string": (block({"name": "add", "arguments": {"x": "a,] }"}}), [call(x="a,] }")]),
    "a long integer": (block({"name": "add", "arguments": {"x": 10**400}}), [call(x=10**400)]),
    "letters of all scripts": (block('{"name": "add", "arguments": {"x": "π ≥ 3 🙂"}}'), [call(x="π ≥ 3 🙂")]),
    "a closed thought before it": (f"<think>Maybe {ONE}</think>{ONE}", [call(x=1)]),
    "a thought that began in the prompt": (f"I add.\n</think>\n{ONE}", [call(x=1)]),
    "nothing": ("", []),
    "text only": ("The answer is 4.", []),
    "an orphan closing tag": ("Done.\n</tool_call>\nNothing else.", []),
    "a fence instead of tags": ('```json\n{"name": "add", "arguments": {}}\n```', []),
    "an open thought without a call": ("<think>Let me see", []),
    "a call in a thought that began in the prompt": (f"Maybe {ONE} or not.</think>The answer is 4.", []),
    "a call in a closed thought": (f"<think>{ONE}</think>The answer is 4.", []),
}

REFUSED = {
    "a call in the syntax of Python": (block("add(1)"), "invalid_json"),
    "a colon missing": (block('{"name": "add", "arguments": {"x" 1}}'), "invalid_json"),
    "a brace missing": (block('{"name": "add", "arguments": {"x": 1}'), "invalid_json"),
    "an escape outside a string": (block('{"name": "add", "arguments": \\n{}\\n}'), "invalid_json"),
    "a trailing comma": (block('{"name": "add", "arguments": {"x": 1,},}'), "invalid_json"),
    "single quotes": (block("{'name': 'add'}"), "invalid_json"),
    "words of Python": (block('{"name": "add", "arguments": {"x": True}}'), "invalid_json"),
    "an empty block": (block(""), "invalid_json"),
    "nothing after the tag": ("<tool_call>", "invalid_json"),
    "not a number": (block('{"name": "add", "arguments": {"x": NaN}}'), "invalid_json"),
    "infinity": (block('{"name": "add", "arguments": {"x": -Infinity}}'), "invalid_json"),
    "a number beyond a double": (block('{"name": "add", "arguments": {"x": 1e999}}'), "invalid_json"),
    "an integer of five thousand digits": (
        block('{"name": "add", "arguments": {"x": ' + "7" * 5000 + "}}"),
        "invalid_json",
    ),
    "a name given twice": (block('{"name": "add", "name": "sub", "arguments": {}}'), "invalid_json"),
    "an argument given twice": (block('{"name": "add", "arguments": {"x": 1, "x": 2}}'), "invalid_json"),
    "a hundred lists in one another": (
        block('{"name": "add", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}"),
        "invalid_json",
    ),
    "an empty object": (block({}), "missing_name"),
    "an empty name": (block({"name": ""}), "missing_name"),
    "a name that is a number": (block({"name": 7, "arguments": {}}), "missing_name"),
    "a name that is null": (block({"name": None, "arguments": {}}), "missing_name"),
    "an empty list": (block([]), "missing_name"),
    "a list of numbers": (block([1]), "missing_name"),
    "a number": (block("1"), "missing_name"),
    "arguments that are a list": (block({"name": "add", "arguments": [1]}), "arguments_not_object"),
    "arguments that are a number": (block({"name": "add", "arguments": 0}), "arguments_not_object"),
    "arguments that are text": (block({"name": "add", "arguments": "x = 1"}), "arguments_not_object"),
    "arguments that are JSON and more in a string": (
        block({"name": "add", "arguments": '{"x": 1} or so'}),
        "arguments_not_object",
    ),
    "arguments under no known name": (block({"name": "add", "args": {"x": 1}}), "wrong_arguments_key"),
    "arguments beside the name": (block({"name": "add", "x": 1}), "wrong_arguments_key"),
    "a thought that never ends before the call": (f"<think>I just run it.\n{ONE}", "unclosed_think"),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_meant_as_a_call_is_read(case):
    """Without an error, and with the arguments as they were written."""
    text, calls = READ[case]
    assert found(text) == (calls, [])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_an_error_and_no_call(case):
    """The error has a kind for programs and a sentence for the model."""
    text, kind = REFUSED[case]
    assert found(text) == ([], [kind])
    assert parse_tool_calls(text).errors[0].detail.endswith(".")


def test_a_bad_block_does_not_hide_a_good_one():
    """Errors and calls stand side by side, calls in order."""
    text = block("oops") + ONE + block({}) + block({"name": "sub"})
    assert found(text) == ([call(x=1), call("sub")], ["invalid_json", "missing_name"])


def test_a_block_that_is_left_open_does_not_hide_the_next():
    assert found('<tool_call>{"name": "sub", \n' + ONE) == ([call(x=1)], ["invalid_json"])


def test_a_second_object_that_cannot_be_read_is_an_error_beside_the_first():
    """Never only the first in silence."""
    assert found(block('{"name": "add"}\n{"name": ')) == ([call("add")], ["invalid_json"])


@pytest.mark.parametrize("more", ['"x"', "and add 2", "sub(1)", '"arguments": {"x": 1}'])
def test_whatever_else_stands_in_a_block_is_an_error_beside_the_call(more):
    """It was meant as something."""
    assert found(block('{"name": "add"} ' + more)) == ([call("add")], ["extra_data"])


def test_a_thought_that_ends_inside_a_broken_block_still_hides_what_was_before():
    """The block does not swallow the end of the thought, nor the call after it."""
    text = f'I could {ONE} or <tool_call>{{"name": </think>{block({"name": "sub"})}'
    assert found(text) == ([call("sub")], [])


# As Llama writes them.

LLAMA = '{"name": "add", "parameters": {"x": 1}}'
SUB = '{"name": "sub", "parameters": {}}'

LLAMA_READ = {
    "a bare object": (LLAMA, [call(x=1)]),
    "after the tag of the model": ("<|python_tag|>" + LLAMA, [call(x=1)]),
    "two with a semicolon": (f"{LLAMA}; {SUB}", [call(x=1), call("sub")]),
    "two with a comma": (f"{LLAMA}, {SUB}", [call(x=1), call("sub")]),
    "two side by side": (LLAMA + SUB, [call(x=1), call("sub")]),
    "two on lines": (f"{LLAMA}\n{SUB}\n", [call(x=1), call("sub")]),
    "two with words between them": (f"{LLAMA} and then {SUB}", [call(x=1), call("sub")]),
    "a list": (f"[{LLAMA}, {SUB}]", [call(x=1), call("sub")]),
    "over several lines": (json.dumps({"name": "add", "parameters": {"x": [1]}}, indent=2), [call(x=[1])]),
    "prose before it": (f"Let's add them:\n\n{LLAMA}", [call(x=1)]),
    "prose on the same line": (f"Let's add them: {LLAMA}", [call(x=1)]),
    "prose with braces after it": (f"{LLAMA}\nThat is {{add}}, of {{course}}.", [call(x=1)]),
    "prose with braces before it": (f"I call {{add}}.\n{LLAMA}", [call(x=1)]),
    "a fence around it": (f"```json\n{LLAMA}\n```", [call(x=1)]),
    "after a thought": (f"<think>Is {SUB} better?</think>{LLAMA}", [call(x=1)]),
    "separators inside a string": ('{"name": "add", "parameters": {"x": "a; {b}, \\n}"}}', [call(x="a; {b}, \n}")]),
    "the other key for arguments": ('{"name": "add", "arguments": {"x": 1}}', [call(x=1)]),
    "a type": ('{"type": "function", "name": "add", "parameters": {"x": 1}}', [call(x=1)]),
    "arguments before the name": ('{"parameters": {"x": 1}, "name": "add"}', [call(x=1)]),
    "no arguments": ('{"name": "add"}', [call()]),
    "other data": ('{"answer": 4}', []),
    "a set": ('{"a", "b"} has two elements.', []),
    "an object inside of a call in other syntax": (f"deploy.run(payload={LLAMA}", []),
    "an object inside of a list of other things": (f"see [1, {LLAMA}]", []),
    "an object quoted in a line": (f'He wrote "{LLAMA}" there.', []),
    "text only": ("The answer is 4.", []),
    "formulas": ("Let $A = \\{x : x > 1\\}$, so \\frac{1}{2}.\n{x}", []),
}

LLAMA_REFUSED = {
    "other syntax after the tag": ("<|python_tag|>add.call(x=1)", "invalid_json"),
    "an object in other syntax after the tag": (f"<|python_tag|>add.call(x={SUB}", "invalid_json"),
    "a brace missing": (LLAMA[:-1], "invalid_json"),
    "a colon missing": (LLAMA.replace('": {', '" {'), "invalid_json"),
    "single quotes": (LLAMA.replace('"', "'"), "invalid_json"),
    "not a number": (LLAMA.replace("1", "NaN"), "invalid_json"),
    "a key given twice": ('{"name": "add", "parameters": {}, "parameters": {}}', "invalid_json"),
    "no name": ('{"parameters": {"x": 1}}', "missing_name"),
    "arguments under no known name": ('{"name": "add", "args": {"x": 1}}', "wrong_arguments_key"),
    "arguments that are a list": ('{"name": "add", "parameters": [1]}', "arguments_not_object"),
    "a thought that never ends": (f"<think>Now {LLAMA}", "unclosed_think"),
}


@pytest.mark.parametrize("case", LLAMA_READ)
def test_what_llama_means_as_a_call_is_read(case):
    text, calls = LLAMA_READ[case]
    assert found(text, "llama_json") == (calls, [])


@pytest.mark.parametrize("case", LLAMA_REFUSED)
def test_what_llama_did_not_get_right_is_an_error_and_no_call(case):
    text, kind = LLAMA_REFUSED[case]
    assert found(text, "llama_json") == ([], [kind])


def test_nothing_is_looked_for_after_a_bare_object_that_cannot_be_read():
    """What comes next may be inside of it; what came before stands."""
    broken = '{"name": "list",\n "parameters": {"steps": [\n'
    assert found(f"{LLAMA}\n{broken}{SUB}\n]", "llama_json") == ([call(x=1)], ["invalid_json"])
