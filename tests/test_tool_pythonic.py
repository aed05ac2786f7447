"""Tool calls in the syntax of Python: literals only, nothing evaluated."""

import pytest

from trace_gym.messages import ToolCall
from trace_gym.tool_formats import parse_tool_calls

TOOLS = (
    {"type": "function", "function": {"name": "move", "parameters": {"properties": {"source": {}, "target": {}}}}},
    {"type": "function", "function": {"name": "stop"}},
)


def found(text, tools=()):
    parsed = parse_tool_calls(text, "pythonic", tools)
    return list(parsed.calls), [error.kind for error in parsed.errors]


def call(name="f", /, **arguments):
    return ToolCall(name, arguments)


READ = {
    "one call": ("[f(a=1)]", [call(a=1)]),
    "two calls": ('[f(a=1), g.h(b="x")]', [call(a=1), call("g.h", b="x")]),
    "two lists": ("[f(a=1)]\nand\n[g()]", [call(a=1), call("g")]),
    "over several lines": ("[\n  f(\n    a=1,  # one\n    b=[2,\n 3],\n  ),\n]", [call(a=1, b=[2, 3])]),
    "prose around it": ("I'd call this:\n[f(a=1)]\nThat is it.", [call(a=1)]),
    "a fence around it": ("```python\n[f(a=1)]\n```", [call(a=1)]),
    "the tag of the model": ("<|python_start|>[f(a=1)]<|python_end|>", [call(a=1)]),
    "after a thought": ("<think>[g()]?</think>[f(a=1)]", [call(a=1)]),
    "no brackets": ("f(a=1)", [call(a=1)]),
    "no brackets, several": ("f(a=1), g()\nh()", [call(a=1), call("g"), call("h")]),
    "no brackets, in a fence": ("```\nf(a=1)\n```", [call(a=1)]),
    "numbers": (
        "[f(a=-1, b=+2.5, c=1e3, d=0x1F, e=1_000, f=.5, g=- 3)]",
        [call(a=-1, b=2.5, c=1000.0, d=31, e=1000, f=0.5, g=-3)],
    ),
    "words": (
        "[f(a=True, b=False, c=None, d=true, e=false, f=null)]",
        [call(a=True, b=False, c=None, d=True, e=False, f=None)],
    ),
    "strings": (
        """[f(a='it', b="it's", c='''x
y''', d=r'\\d', e=u"ü", f='a' "b")]""",
        [call(a="it", b="it's", c="x\ny", d="\\d", e="ü", f="ab")],
    ),
    "escapes": (
        r"""[f(a='\n\t\\\'\"\x41\u00e9\U0001F642\101\
', b='\d')]""",
        [call(a="\n\t\\'\"Aé🙂A", b="\\d")],
    ),
    "a real line break inside of quotes": ("[f(a='x = 1\nx')]", [call(a="x = 1\nx")]),
    "brackets and quotes inside of strings": ("""[f(a=")]}'", b='#"')]""", [call(a=")]}'", b='#"')]),
    "a long integer": (f"[f(a={10**400}, b=-{10**400})]", [call(a=10**400, b=-(10**400))]),
    "lists and dicts": ("[f(a=[], b={}, c={'x': [1, {'y': 2}]})]", [call(a=[], b={}, c={"x": [1, {"y": 2}]})]),
    "tuples and sets": ("[f(a=(), b=(1,), c=(1), d=(1, 2), e={1, 2})]", [call(a=[], b=[1], c=1, d=[1, 2], e=[1, 2])]),
    "a reserved word as a parameter": ("[f(from='a', class=1)]", [ToolCall("f", {"from": "a", "class": 1})]),
    "spaces": ("[ f( a = 1 ,b=2 ) ]", [call(a=1, b=2)]),
    "in a thought that ends in a comment": ("[f(a=1, # so</think>\n)] It is 12.", []),
    "in a thought that ends behind it": ("[f(a=1)] # so</think>It is 12.", []),
    "no call": ("The list [1, 2] and the interval [a, b] are no calls.", []),
    "prose that begins like a call": ("f(2) is even, since g(x) is.", []),
    "a formula": ("P(x) = x^2\n\\boxed{4}", []),
    "a list later in a line": ("So we get [f(a=1)] here.", []),
}
REFUSED = {
    "a name for a value": ("[f(a=x)]", "not_literal"),
    "a call for a value": ("[f(a=__import__('os'))]", "not_literal"),
    "a call inside of a string that is formatted": ("[f(a=f'{1+1}')]", "not_literal"),
    "bytes": ("[f(a=b'x')]", "not_literal"),
    "a complex number": ("[f(a=2j)]", "not_literal"),
    "a lambda": ("[f(a=lambda: 1)]", "not_literal"),
    "a key that is no string": ("[f(a={1: 2})]", "not_literal"),
    "unpacking": ("[f(**{'a': 1})]", "not_literal"),
    "an operator": ("[f(a=2**99999999)]", "invalid_syntax"),
    "a sum of strings": ("[f(a='x' + 'y')]", "invalid_syntax"),
    "a comprehension": ("[f(a=[1 for _ in 'x'])]", "invalid_syntax"),
    "a method of a value": ("[f(a='x'.upper())]", "invalid_syntax"),
    "calls in a row": ("[f(a=1)(b=2)]", "invalid_syntax"),
    "a comparison": ("[f(a==1)]", "not_literal"),
    "a leading zero": ("[f(a=007)]", "invalid_syntax"),
    "a number beyond a double": ("[f(a=1e999)]", "invalid_syntax"),
    "a number of five thousand digits": (f"[f(a={'9' * 5000})]", "invalid_syntax"),
    "a broken escape": (r"[f(a='\x4')]", "invalid_syntax"),
    "an escape beyond Unicode": (r"[f(a='\U00110000')]", "invalid_syntax"),
    "an open string": ("[f(a='x)]", "invalid_syntax"),
    "an open list": ("[f(a=1), g(", "not_literal"),
    "an open bracket": ("[f(a=1)", "invalid_syntax"),
    "no comma": ("[f(a=1) g()]", "invalid_syntax"),
    "something that is no call beside one": ("[f(a=1), 2]", "invalid_syntax"),
    "a dict and a set in one": ("[f(a={'x': 1, 2})]", "invalid_syntax"),
    "a hundred lists in one another": (f"[f(a={'[' * 100}{']' * 100})]", "invalid_syntax"),
    "an argument given twice": ("[f(a=1, a=2)]", "duplicate_argument"),
    "a key given twice": ("[f(a={'x': 1, 'x': 2})]", "duplicate_argument"),
    "an argument without a name": ("[f(1)]", "positional_argument"),
    "a thought that never ends": ("<think>so\n[f(a=1)]", "unclosed_think"),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_meant_as_a_call_is_read(case):
    text, calls = READ[case]
    assert found(text) == (calls, [])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_literal_call_is_an_error_and_no_call(case):
    text, kind = REFUSED[case]
    assert found(text) == ([], [kind])
    assert parse_tool_calls(text, "pythonic").errors[0].detail.endswith(".")


def test_of_a_list_all_calls_run_or_none():
    """And nothing after a list that cannot be read: where it ends is anybody's guess."""
    assert found("[f(a=1)]\n[g(a=1), g(a=x)]\n[h()]") == ([call(a=1)], ["not_literal"])


def test_positional_arguments_get_their_names_from_the_tools():
    """In the order of the schema; what has no name there is an error."""
    assert found("[move('a', 'b')]", TOOLS) == ([call("move", source="a", target="b")], [])
    assert found("[move('a', target='b')]", TOOLS) == ([call("move", source="a", target="b")], [])
    assert found("[move('a', source='b')]", TOOLS) == ([], ["duplicate_argument"])
    assert found("[move('a', 'b', 'c')]", TOOLS) == ([], ["positional_argument"])
    assert found("[stop(1)]", TOOLS) == ([], ["positional_argument"])
    assert found("[python('1 + 1'), search('tides')]") == (
        [call("python", code="1 + 1"), call("search", query="tides")],
        [],
    )
