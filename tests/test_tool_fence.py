"""Fenced blocks of Python as tool calls."""

import pytest

from trace_gym.messages import ToolCall
from trace_gym.tool_formats import parse_tool_calls, render_tool_call


def found(text):
    """Return the code of the calls and the kinds of error."""
    parsed = parse_tool_calls(text, "python_fence")
    assert all(call.name == "python" and list(call.arguments) == ["code"] for call in parsed.calls)
    return [call.arguments["code"] for call in parsed.calls], [error.kind for error in parsed.errors]


DOCSTRING = 'def f():\n    """\n    ```python\n    f()\n    ```\n    """\n    return 1'

READ = {
    "a block": ("```python\nx = 1\nx\n```", ["x = 1\nx"]),
    "prose around it": ("I count.\n\n```python\nx\n```\n\nLet me see.", ["x"]),
    "short name": ("```py\nx\n```", ["x"]),
    "long name": ("```Python3\nx\n```", ["x"]),
    "tildes": ("~~~python\nx\n```\n~~~", ["x\n```"]),
    "spaces and carriage returns": ("```  python  \r\nx\r\ny\r\n```\r\n", ["x\ny"]),
    "attributes": ("```python {.cell}\nx\n```", ["x"]),
    "behind words": ("The code: ```python\nx\n```", ["x"]),
    "no line break before the end": ("```python\nprint(7)```", ["print(7)"]),
    "no end": ("```python\nfor i in x:\n    i", ["for i in x:\n    i"]),
    "no end, a line break": ("```python\nx\n", ["x"]),
    "two blocks": ("```python\nx = 1\n```\nthen\n```python\nx\n```", ["x = 1", "x"]),
    "two blocks, the first left open": ("```python\nx = 1\n```python\nx\n```", ["x = 1", "x"]),
    "indented": ("1. So:\n   ```python\n   if x:\n       y\n   ```\n2. Done", ["if x:\n    y"]),
    "empty lines kept": ("```python\n\nx\n\n```", ["\nx\n"]),
    "a fence in a docstring": (f"```python\n{DOCSTRING}\n```\nThat is f.", [DOCSTRING]),
    "a fence in a string": ("```python\nprint('```')\nx = '''\n```\n'''\n```", ["print('```')\nx = '''\n```\n'''"]),
    "a fence in a comment": ("```python\nx  # not ```\ny\n```", ["x  # not ```\ny"]),
    "an apostrophe in a comment": ("```python\n# it's\nx\n```\nisn't it", ["# it's\nx"]),
    "a string that is never closed": ("```python\nx = 'y\n```\nand '", ["x = 'y"]),
    "a docstring that is never closed": ("```python\nx = '''y\n```\ngood", ["x = '''y"]),
    "a longer fence": ("````python\nx = '```\n```\n````", ["x = '```\n```"]),
    "tags in a string": ("```python\nx = '<think>' + '</think>'\n```", ["x = '<think>' + '</think>'"]),
    "a plain block before it": ("```\nnot this\n```\n```python\nx\n```", ["x"]),
    "a block of another language before it": ('```json\n{"x": 1}\n```\n```python\nx\n```', ["x"]),
    "the end of a block nobody opened before it": ("x = 1\n```\nAgain:\n```python\nx\n```", ["x"]),
    "a block inside of a block of Markdown": ("```markdown\n```python\nx\n```\nthat was it", []),
    "a block inside of a longer fence": ("````\n```python\nx\n```\n````", []),
    "only the end of a block": ("x = 1\nx\n```", []),
    "a plain block": ("```\nx\n```", []),
    "in the middle of a line": ("Write ```python x``` and so on.", []),
    "words only": ("It is 12.", []),
    "in a thought": ("<think>\n```python\nx\n```\n</think>\nIt is 12.", []),
    "in a thought that began in the prompt": ("```python\nx\n```\n</think>\nIt is 12.", []),
    "a thought that ends inside of a block": ("So\n```python\nx\n</think>\n```python\ny\n```", ["y"]),
    "a thought that ends inside of a plain block": ("So\n```\nx\n</think>\n```python\ny\n```", ["y"]),
    "a thought that ends in a comment": ("So\n```python\nx # hm</think>It is 12.", []),
    "a thought that ends behind an apostrophe": ("So\n```python\nit's x</think>\nIt is 12.", []),
}


@pytest.mark.parametrize("case", READ)
def test_blocks_of_python_are_calls_in_order(case):
    """Whatever their strings and comments hold."""
    text, code = READ[case]
    assert found(text) == (code, [])


@pytest.mark.parametrize("name", ["output", "Output", "stdout", "results", "observation"])
def test_what_follows_an_invented_output_does_not_count(name):
    """Neither code nor answer: it was said on the strength of an invention."""
    parsed = parse_tool_calls(
        f"Run\n```python\nx\n```\n  ``` {name}\n7\n```\n```python\ny\n```\nIt is 7.", "python_fence"
    )
    assert [call.arguments["code"] for call in parsed.calls] == ["x"]
    assert parsed.is_cut and "7" not in parsed.said


@pytest.mark.parametrize("text", ["```python\n```", "```python\n \n\n```", "```python", "```python\n"])
def test_an_empty_block_is_an_error(text):
    """It was meant as a call, of nothing."""
    assert found(text) == ([], ["no_code"])


def test_an_open_thought_with_a_block_is_an_error():
    assert found("<think>\n```python\nx\n```") == ([], ["unclosed_think"])


def test_plain_code_is_written_with_the_usual_fence_and_tricky_code_with_a_longer_one():
    """Such that what follows cannot be drawn into the block."""
    assert render_tool_call(ToolCall("python", {"code": "x\n'y'"}), "python_fence") == "```python\nx\n'y'\n```"
    for code in ("'''", "x = '```'", "~~~", "x \\", "````", DOCSTRING):
        text = render_tool_call(ToolCall("python", {"code": code}), "python_fence")
        assert text.startswith("````")
        assert found(f"{text}\n'''\n{text}\n") == ([code, code], [])
