"""Laws of the tree viewer; what the page draws is looked at by eye, what goes into it is tested."""

import base64
import hashlib
import json
import re

import pytest

from trace_gym.errors import BadInputError
from trace_gym.messages import Failure, Message
from trace_gym.tree import NO_PARENT, Node, RolloutTree
from trace_gym.viewer import Flip, flips, most_telling, print_tree, write_html

HOSTILE = "\x1b[31m\u202e\u2028</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & {{data}} {{title}}"


def grow(*rows, task_id="toy/1", text="…"):
    """Build a tree from (parent, birth, reward) rows; a reward of None leaves the turn open."""
    tree = RolloutTree("trace_gym/Toy-v0", task_id, Node(NO_PARENT, (Message("user", text),), value=0.5))
    for parent, birth, reward in rows:
        tree.add(
            Node(
                parent, (Message("assistant", text),), (1, 2), (True, False), (-0.5, 0.0),
                birth=birth, reward=reward, status="open" if reward is None else "terminal",
            )
        )  # fmt: skip
    return tree


FLIPPED = [(0, 0, None), (1, 0, None), (2, 0, 0.0), (2, 2, 1.0), (2, 2, 0.0), (1, 1, 1.0)]


def page(tmp_path, trees, title="Trees"):
    write_html(trees, tmp_path / "page.html", title)
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def embedded(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_flip_is_a_continuation_that_ended_otherwise_than_its_rollout():
    """A continuation with the same outcome, or a bare rollout, is none; later anchors come first."""
    assert flips(grow(*FLIPPED)) == [Flip(2, 3, 4), Flip(1, 3, 6)]
    assert flips(grow((0, 0, 0.0), (0, 0, 1.0))) == []


def test_a_rollout_that_was_set_right_comes_before_one_that_was_spoilt():
    """The first flip is the one the page opens on."""
    tree = grow((0, 0, None), (1, 0, 1.0), (1, 1, 0.0), (0, 0, None), (4, 0, 0.0), (4, 4, 1.0))
    assert flips(tree) == [Flip(4, 5, 6), Flip(1, 2, 3)]


def test_failures_and_open_ends_are_no_side_of_a_flip():
    """Only outcomes are compared."""
    tree = grow((0, 0, None), (1, 0, None), (1, 1, 1.0))
    tree.add(Node(1, (), birth=1, status="failed", failure=Failure("deadline", "Too late.")))
    assert flips(tree) == []


def test_the_most_telling_tree_shows_a_flip_at_a_later_turn():
    """Then both outcomes among bare rollouts, then anything; among equals the first."""
    flat, mixed = grow((0, 0, 0.0)), grow((0, 0, 0.0), (0, 0, 1.0))
    early, late = grow((0, 0, None), (1, 0, None), (2, 0, 0.0), (1, 1, 1.0)), grow(*FLIPPED)
    assert most_telling([flat, mixed, early, late]) is late
    assert most_telling([flat, mixed, early]) is early
    assert most_telling([flat, mixed]) is mixed
    assert most_telling([flat, grow((0, 0, 0.0))]) is flat
    with pytest.raises(BadInputError, match="at least one"):
        most_telling([])


def test_the_page_holds_every_node_and_opens_on_the_most_telling_tree(tmp_path):
    """Means and counts are over the leaves below a node."""
    data = embedded(page(tmp_path, [grow((0, 0, 0.0)), grow(*FLIPPED)]))
    assert data["start"] == 1
    nodes = data["trees"][1]["nodes"]
    assert [node["leaves"] for node in nodes] == [4, 4, 3, 1, 1, 1, 1]
    assert [node["mean"] for node in nodes] == [0.5, 0.5, 0.3333, 0.0, 1.0, 0.0, 1.0]
    assert data["trees"][1]["flips"] == [
        {"anchor": 2, "kept": 3, "other": 4},
        {"anchor": 1, "kept": 3, "other": 6},
    ]
    assert nodes[1]["ids"] == [1]
    assert nodes[1]["logprobs"] == [-0.5]


def test_a_failed_leaf_counts_as_a_leaf_and_not_as_an_outcome(tmp_path):
    """Nothing is ever averaged over failures."""
    tree = grow((0, 0, 1.0))
    tree.add(Node(0, (), status="failed", failure=Failure("deadline", "Too late.")))
    root, _, failed = embedded(page(tmp_path, [tree]))["trees"][0]["nodes"]
    assert (root["leaves"], root["mean"]) == (2, 1.0)
    assert (failed["kind"], failed["mean"], failed["reason"]) == ("failed", None, "Too late.")


def test_hostile_text_stays_text(tmp_path):
    """It ends no element, opens none, fills no slot of the template, and comes back unchanged."""
    text = page(tmp_path, [grow(*FLIPPED, task_id=HOSTILE, text=HOSTILE)], title=HOSTILE)
    harmless = page(tmp_path, [grow(*FLIPPED)])
    for tag in ("<script", "</script", "<img", "<!--", "<title"):
        assert text.count(tag) == harmless.count(tag), tag
    assert "alert(2)>" not in text
    assert "\u2028" not in re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    tree = embedded(text)["trees"][0]
    assert tree["task_id"] == tree["nodes"][1]["messages"][0]["content"] == HOSTILE


def test_text_that_no_encoding_holds_is_written(tmp_path):
    """Broken surrogates come out of tokenizers."""
    tree = embedded(page(tmp_path, [grow((0, 0, 1.0), text="a\ud800b")], title="a\ud800b"))["trees"][0]
    assert tree["nodes"][1]["messages"][0]["content"] == "a\ud800b"


def test_the_page_may_run_its_own_script_and_nothing_else(tmp_path):
    """The policy allows one script and one style by hash; it fits what the file really holds."""
    text = page(tmp_path, [grow(*FLIPPED)])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy


def test_the_page_needs_no_network_and_parses_no_data_as_html(tmp_path):
    """Self-contained: no address to load from, and none of the ways by which text becomes markup."""
    text = page(tmp_path, [grow(*FLIPPED)])
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"] * 2
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "src=",
        "href=",
        "@import",
    ):
        assert way not in text, way


def test_the_same_trees_give_the_same_page(tmp_path):
    """No clock and no random name stands in it."""
    assert page(tmp_path, [grow(*FLIPPED)]) == page(tmp_path, [grow(*FLIPPED)])


def test_without_a_tree_there_is_no_page(tmp_path):
    """An empty file would look like a bug."""
    with pytest.raises(BadInputError, match="at least one"):
        write_html([], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_terminal_tree_puts_continuations_below_their_anchor():
    """One turn a line, a branch at one indentation."""
    tree = grow(*FLIPPED)
    tree.advantages[4] = 0.5
    assert print_tree(tree).splitlines() == [
        "toy/1  (trace_gym/Toy-v0, step 0)",
        "4 leaves: 2 wrong, 2 correct; flips: 2",
        "prompt  mean 0.50 of 4  v 0.50  …",
        "└─ 1 turn 1  mean 0.50 of 4  anchor of 1  …",
        "   ├─ 6 turn 2  [correct 1]  …",
        "   2 turn 2  mean 0.33 of 3  anchor of 2  …",
        "   ├─ 4 turn 3  [correct 1]  adv +0.50  …",
        "   ├─ 5 turn 3  [wrong 0]  …",
        "   3 turn 3  [wrong 0]  …",
    ]


def test_the_terminal_tree_lets_no_control_character_through():
    """A model must not be able to move the cursor, colour the screen or reorder the line."""
    shown = print_tree(grow((0, 0, 1.0), task_id=HOSTILE, text=HOSTILE + "\n\r\x07"))
    assert all(character.isprintable() for line in shown.split("\n") for character in line)
    assert len(shown.split("\n")) == 4


def test_a_prompt_alone_can_be_looked_at(tmp_path):
    """Prompts that the allocator skipped are trees, too."""
    assert "0 leaves: none" in print_tree(grow())
    assert embedded(page(tmp_path, [grow()]))["trees"][0]["nodes"][0]["mean"] is None
