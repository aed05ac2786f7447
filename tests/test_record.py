"""Laws of trees on disk."""

import json
import math

import numpy as np
import pytest

from trace_gym.errors import BadInputError
from trace_gym.messages import Failure, Message
from trace_gym.record import read_trees, to_messages, write_trees
from trace_gym.snapshot import EnvState
from trace_gym.tree import NO_PARENT, Node, RolloutTree

HOSTILE = 'line\u2028feed\u0085\r\n"\\\x00\ud800 é → </script> {"schema":1'


def sample(task_id="toy/1", step=3):
    state = EnvState("Toy", task_id, '{"x":1}', (("TimeLimit", "1"),))
    prompt = Node(
        NO_PARENT,
        (Message("user", HOSTILE),),
        (1, 2),
        (False, False),
        (0.0, 0.0),
        state=state,
        value=0.1 + 0.2,
    )
    tree = RolloutTree("trace_gym/Toy-v0", task_id, prompt, step)
    said = (Message("assistant", HOSTILE), Message("tool", "4", name="python"))
    first = tree.add(
        Node(
            0, said, (3, 4, 5), (True, True, False), (-0.1, -1 / 3, 0.0), state=state, value=0.5,
            num_generated=2, num_tool_calls=2, num_tool_errors=1,
        )
    )  # fmt: skip
    wrong = tree.add(Node(first, said[:1], status="terminal", reward=0.0, outcome={"verdict": "wrong", "reason": "no"}))
    right = tree.add(
        Node(
            first,
            (),
            status="truncated",
            reward=1.0,
            birth=first,
            outcome={"verdict": "correct", "reason": HOSTILE},
        )
    )
    tree.add(Node(0, (), status="failed", failure=Failure("deadline", "Too late.")))
    tree.add(Node(0, said))
    tree.advantages = {wrong: -0.7, right: 1 / 3}
    return tree


def same(a, b):
    return vars(a) == vars(b)


def test_a_tree_comes_back_exactly(tmp_path):
    """Every field but the states: floats bit for bit, types included, text with any character."""
    trees = [sample(), sample("toy/2", 4)]
    write_trees(tmp_path / "t.jsonl", trees)
    found = list(read_trees(tmp_path / "t.jsonl"))
    assert len(found) == 2
    assert all(same(a, b) for a, b in zip(found, trees, strict=True))
    assert [type(flag) for flag in found[0].nodes[1].sampled] == [bool] * 3
    assert found[0].nodes[0].state is None


def test_states_come_back_when_asked_for(tmp_path):
    """Episodes can then be taken up again; without, the content hash is kept."""
    tree = sample()
    write_trees(tmp_path / "with.jsonl", [tree], with_states=True)
    found = next(read_trees(tmp_path / "with.jsonl"))
    assert found.nodes[1].state == tree.nodes[1].state
    assert found.nodes[2].state is None
    write_trees(tmp_path / "without.jsonl", [tree])
    row = json.loads((tmp_path / "without.jsonl").read_text())
    assert row["nodes"][1]["state_key"] == tree.nodes[1].state.key
    assert "state" not in row["nodes"][1]


def test_a_state_that_does_not_fit_its_key_is_refused(tmp_path):
    """A changed state would silently start another episode."""
    path = tmp_path / "t.jsonl"
    write_trees(path, [sample()], with_states=True)
    path.write_text(path.read_text().replace(r"\\\"x\\\":1", r"\\\"x\\\":2"))
    with pytest.raises(BadInputError, match="state_key"):
        list(read_trees(path))


def test_one_tree_is_one_line_whatever_its_text_holds(tmp_path):
    """Only a line feed ends a line, and every other line break is escaped."""
    write_trees(tmp_path / "t.jsonl", [sample(), sample()])
    data = (tmp_path / "t.jsonl").read_bytes()
    assert data.isascii()
    assert data.count(b"\n") == len(data.decode().splitlines()) == 2


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    """Samplers hand over numpy scalars."""
    tree = RolloutTree("Toy", "1", Node(NO_PARENT, ()))
    logprobs = tuple(np.array([-0.1], np.float32))
    tree.add(Node(0, (), tuple(np.array([7])), (np.bool_(True),), logprobs, reward=np.float64(1), status="terminal"))
    write_trees(tmp_path / "t.jsonl", [tree])
    node = next(read_trees(tmp_path / "t.jsonl")).nodes[1]
    assert (node.token_ids, node.sampled, node.logprobs, node.reward) == ((7,), (True,), logprobs, 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_never_written(tmp_path, bad):
    """The error names the tree, and the file is left as it was."""
    tree = sample()
    tree.add(Node(0, (), (1,), (True,), (bad,)))
    write_trees(tmp_path / "t.jsonl", [sample()])
    before = (tmp_path / "t.jsonl").read_bytes()
    with pytest.raises(BadInputError, match=r"'toy/1'.*JSON"):
        write_trees(tmp_path / "t.jsonl", [sample(), tree])
    assert (tmp_path / "t.jsonl").read_bytes() == before


def test_trees_are_added_or_replaced(tmp_path):
    """Adding is the default, as a run writes step by step."""
    path = tmp_path / "t.jsonl"
    write_trees(path, [sample("a")])
    write_trees(path, [sample("b")])
    assert [tree.task_id for tree in read_trees(path)] == ["a", "b"]
    write_trees(path, [sample("c")], append=False)
    assert [tree.task_id for tree in read_trees(path)] == ["c"]


@pytest.mark.parametrize("cut", [1, 5, 12, 200, -2])
def test_a_half_written_last_line_is_passed_over_and_cut_off(tmp_path, cut):
    """An interrupt loses the tree that was being written and no other."""
    path = tmp_path / "t.jsonl"
    write_trees(path, [sample("a")])
    line = path.read_bytes()
    path.write_bytes(line + line[:cut])
    assert [tree.task_id for tree in read_trees(path)] == ["a"]
    with pytest.raises(BadInputError, match="line 2"):
        list(read_trees(path, strict=True))
    write_trees(path, [sample("b")])
    assert [tree.task_id for tree in read_trees(path, strict=True)] == ["a", "b"]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    """Editors drop the last line feed."""
    path = tmp_path / "t.jsonl"
    write_trees(path, [sample("a")])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write_trees(path, [sample("b")])
    assert [tree.task_id for tree in read_trees(path, strict=True)] == ["a", "b"]


def test_a_file_of_something_else_is_not_cut(tmp_path):
    """A wrong path must not cost the user a line."""
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(BadInputError, match="append=False"):
        write_trees(path, [sample()])
    assert path.read_text() == "dear diary"


def edited(change):
    def edit(row):
        change(row)
        return json.dumps(row)

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda row: '{"schema":1,', "not valid JSON"),
        (lambda row: "[" * 100_000, "nested too deeply"),
        (lambda row: "[]", "a list, not an object"),
        (lambda row: json.dumps(row).replace("-0.1", "NaN"), "NaN is not JSON"),
        (edited(lambda row: row.update(schema=2)), "schema 2; this version reads schema 1"),
        (edited(lambda row: row.pop("task_id")), "'task_id' is missing"),
        (edited(lambda row: row.update(reward=1)), "Unknown field of a tree 'reward'"),
        (edited(lambda row: row["nodes"].clear()), "begins with the prompt"),
        (edited(lambda row: row["nodes"][1].update(rewrd=1)), "Did you mean 'reward'"),
        (edited(lambda row: row["nodes"][1].pop("parent")), "parent"),
        (edited(lambda row: row["nodes"][1].update(parent=7)), "Parent 7 does not exist"),
        (edited(lambda row: row["nodes"][1].update(token_ids="abc")), "token_ids of node 1"),
        (edited(lambda row: row["nodes"][1].update(token_ids=[1])), "1 ids, 3 flags"),
        (edited(lambda row: row["nodes"][1].update(value=True)), "value of node 1"),
        (edited(lambda row: row["nodes"][2].update(status="done")), "not one of open, terminal"),
        (edited(lambda row: row["nodes"][2].update(outcome=3)), "outcome of node 2"),
        (edited(lambda row: row["nodes"][1].update(messages=[{"role": "x", "content": ""}])), "not one of"),
        (edited(lambda row: row["nodes"][1].update(messages=[{"role": "user"}])), "'content' is missing"),
        (edited(lambda row: row["advantages"].update({"99": 1.0})), "node '99', which does not exist"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_file_line_and_what_was_expected(tmp_path, edit, said):
    """The trees before it are still given out."""
    path = tmp_path / "t.jsonl"
    write_trees(path, [sample()])
    line = path.read_text()
    path.write_text(line + edit(json.loads(line)) + "\n" + line)
    trees = read_trees(path)
    next(trees)
    with pytest.raises(BadInputError, match=r"t\.jsonl, line 2: .*Expected") as caught:
        next(trees)
    assert said in str(caught.value)


def test_a_conversation_row_is_made_of_every_leaf():
    """Failed leaves have no reward, open ends are no leaves; all rows have the same columns."""
    rows = to_messages(sample())
    found = [(row["leaf"], row["reward"], row["birth"]) for row in rows]
    assert found == [(2, 0.0, 0), (3, 1.0, 1), (4, None, 0)]
    assert [row["advantage"] for row in rows] == [-0.7, 1 / 3, None]
    assert rows[0]["messages"][2] == {"role": "tool", "content": "4", "name": "python"}
    assert len({frozenset(row) for row in rows}) == 1
