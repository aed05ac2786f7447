"""Laws of the rollout tree."""

import dataclasses

import numpy as np
import pytest

from trace_gym.budget import Cost, nominal_cost
from trace_gym.errors import BadInputError
from trace_gym.messages import Failure, Message
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree


def turn(parent, text="…", birth=ROOT, reward=None, ids=(), sampled=(), **more):
    status = more.pop("status", "open" if reward is None else "terminal")
    return Node(
        parent,
        (Message("assistant", text),),
        token_ids=ids,
        sampled=sampled,
        logprobs=(0.0,) * len(ids),
        birth=birth,
        reward=reward,
        status=status,
        **more,
    )


def new_tree(ids=()):
    prompt = Node(NO_PARENT, (Message("user", "q"),), ids, sampled=(False,) * len(ids), logprobs=(0.0,) * len(ids))
    return RolloutTree("trace_gym/Toy-v0", "toy/1", prompt)


def branched():
    """Two rollouts (1-2-3 wrong, 4-5 failed) and two continuations from node 1 (6-7 correct, 8 wrong)."""
    tree = new_tree()
    for node in (
        turn(0, num_generated=3, num_tool_calls=1, num_tool_errors=1),
        turn(1, num_generated=4, num_tool_calls=2),
        turn(2, reward=0.0, num_generated=5),
        turn(0, num_generated=6),
        turn(4, status="failed", failure=Failure("sandbox_died", "It died.")),
        turn(1, birth=1, num_generated=7),
        turn(6, birth=1, reward=1.0, num_generated=8),
        turn(1, birth=1, reward=0.0, num_generated=9),
    ):
        tree.add(node)
    return tree


def test_a_path_holds_exactly_the_tokens_in_the_order_the_sampler_saw():
    """Concatenated deltas are the whole sequence; siblings share the ids of their prefix."""
    tree = new_tree(ids=(1, 2))
    anchor = tree.add(turn(0, ids=(3, 4, 5), sampled=(True, True, False)))
    first = tree.add(turn(anchor, ids=(6,), sampled=(True,), reward=0.0))
    second = tree.add(turn(anchor, ids=(7,), sampled=(True,), reward=1.0, birth=anchor))
    assert tree.token_ids(first) == [1, 2, 3, 4, 5, 6]
    assert tree.token_ids(second) == [*tree.token_ids(anchor), 7]
    assert [token for token, sampled, _ in tree.tokens(second) if sampled] == [3, 4, 7]


def test_a_nodes_parent_comes_before_it():
    """Parents are smaller than their children, so one backward pass visits children first."""
    tree = branched()
    assert tree.parents()[ROOT] == NO_PARENT
    assert all(parent < index for index, parent in enumerate(tree.parents()))


def test_children_and_parents_tell_the_same_story():
    """Every node but the root is a child of its parent and of nobody else, in order of birth."""
    tree = branched()
    pairs = [(parent, child) for parent, found in enumerate(tree.children()) for child in found]
    assert sorted(child for _, child in pairs) == list(range(1, len(tree)))
    assert all(tree.nodes[child].parent == parent for parent, child in pairs)
    assert tree.children()[1] == [2, 6, 8]


def test_a_path_runs_from_the_root_to_the_node():
    """Both ends are included and every step is a parent."""
    tree = branched()
    assert tree.path(7) == [0, 1, 6, 7]
    assert tree.path(ROOT) == [ROOT]


def test_leaves_are_the_nodes_at_which_an_episode_ended():
    """Failed ones are leaves, too."""
    assert branched().leaves() == [3, 5, 7, 8]


def test_a_failed_leaf_has_no_return():
    """NaN is not zero: a failure is not an outcome."""
    returns = branched().returns()
    assert np.isnan(returns[5])
    assert returns[[3, 7, 8]].tolist() == [0.0, 1.0, 0.0]


def test_a_continuation_belongs_to_the_rollout_it_was_started_from():
    """Leaves of one bare rollout and of its continuations share the first turn."""
    tree = branched()
    assert [tree.rollout(leaf) for leaf in tree.leaves()] == [1, 4, 1, 1]


def test_only_branching_nodes_with_both_outcomes_below_are_mixed_anchors():
    """The root counts if two of its children lead to outcomes; a unary chain reports a contrast once."""
    tree = branched()
    assert tree.mixed_anchors() == [0, 1]
    lonely = new_tree()
    lonely.add(turn(0))
    lonely.add(turn(1))
    lonely.add(turn(2, reward=0.0))
    assert lonely.mixed_anchors() == []
    lonely.add(turn(2, birth=2, reward=1.0))
    assert lonely.mixed_anchors() == [2]


def test_failures_make_no_prompt_mixed():
    """One outcome and one failure are one outcome."""
    tree = new_tree()
    tree.add(turn(0, reward=0.0))
    tree.add(turn(0, status="failed", failure=Failure("deadline", "Too late.")))
    assert not tree.is_mixed()
    tree.add(turn(0, reward=1.0))
    assert tree.is_mixed()


def test_a_prefix_counts_what_lies_on_its_path_only():
    """Turns, generated tokens and tool errors of siblings are not seen by the predictor."""
    prefix = branched().prefix(6)
    assert (prefix.turn, prefix.num_tokens, prefix.num_tool_errors) == (2, 10, 1)
    assert [m.role for m in prefix.messages] == ["user", "assistant", "assistant"]
    root = branched().prefix(ROOT)
    assert (root.turn, root.num_tokens, root.task_id) == (0, 0, "toy/1")


def test_a_shared_turn_is_paid_for_once():
    """The cost of a tree is the sum over its nodes, not over its paths."""
    cost = Cost.of(branched())
    assert cost == Cost(rollouts=2, continuations=2, turns=8, tokens=42, tool_calls=3)
    assert cost + cost == Cost(rollouts=4, continuations=4, turns=16, tokens=84, tool_calls=6)


def test_the_nominal_cost_is_that_of_the_paper():
    """M (1 + N / 2)."""
    assert nominal_cost(1024, 2) == 2048
    assert nominal_cost(512, 6) == 2048
    with pytest.raises(BadInputError, match="negative"):
        nominal_cost(1, -1)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (turn(9), "Parent 9 does not exist"),
        (turn(NO_PARENT), "Parent -1 does not exist"),
        (turn(3), "Node 3 is terminal"),
        (turn(5), "Node 5 is failed"),
        (turn(4, birth=1), "Birth 1 is not on the path"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(node, said):
    """Unknown parents, ended parents and births elsewhere never enter a tree."""
    tree = branched()
    with pytest.raises(BadInputError, match=said):
        tree.add(node)
    assert len(tree) == 9


def test_columns_of_a_node_have_one_length():
    """One flag and one logprob per token."""
    with pytest.raises(BadInputError, match="2 ids, 1 flags, 0 logprobs"):
        Node(0, (), token_ids=(1, 2), sampled=(True,))


def test_a_failed_node_has_a_failure_and_no_reward():
    """A failure is never scored."""
    with pytest.raises(BadInputError, match="failed"):
        turn(0, status="failed")
    with pytest.raises(BadInputError, match="failed"):
        turn(0, status="failed", reward=0.0, failure=Failure("deadline", "Too late."))


def test_nodes_are_frozen():
    """What was played cannot be changed afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        branched().nodes[1].reward = 1.0


def test_a_prompt_has_no_parent():
    """A tree starts at the root."""
    with pytest.raises(BadInputError, match="no parent"):
        RolloutTree("id", "task", turn(0))
