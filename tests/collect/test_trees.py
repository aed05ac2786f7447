"""What a tree is: exact tokens, restored states, independent siblings, and equal trees for equal seeds."""

import asyncio
import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from walk import END, TASKS, Letters, Talker, Walk, collector, grow, nodes

from trace_gym.snapshot import load_state
from trace_gym.tree import ROOT


@pytest.mark.parametrize("batched", [True, False])
def test_the_tokens_of_a_path_are_exactly_what_the_sampler_saw(batched):
    """Ids up to a node's parent are the prompt of the request that the node answers; its sampled ids the answer."""
    agent = Talker(batched)
    trees = grow(agent=agent, expansions=4).trees
    turns = [(tree, index, node) for tree in trees for index, node in enumerate(tree.nodes) if index != ROOT]
    assert len(turns) > 30
    seen = Counter(tuple(tree.token_ids(node.parent)) for tree, _, node in turns)
    assert seen == Counter(request.prompt_ids for request in agent.requests)
    given = Counter((completion.token_ids, completion.logprobs) for completion in agent.said)
    said = [sum(node.sampled) for _, _, node in turns]
    assert all(node.sampled[:n] == (True,) * n for n, (_, _, node) in zip(said, turns, strict=True))
    assert given == Counter(
        (node.token_ids[:n], node.logprobs[:n]) for n, (_, _, node) in zip(said, turns, strict=True)
    )


def test_the_tokens_of_a_path_spell_the_conversation():
    """With a template that only strings messages together; what nobody reads any more is left out."""
    for tree in grow(expansions=4).trees:
        for index, node in enumerate(tree.nodes):
            path = [message for i in tree.path(index) for message in tree.nodes[i].messages]
            is_over = node.status != "open"
            if is_over:
                while path[-1].role != "assistant":
                    path.pop()
            messages = [message.to_dict() for message in path]
            text = Letters().apply_chat_template(messages, add_generation_prompt=not is_over)
            if is_over and node.token_ids[-1] != ord(END):
                text = text.removesuffix(END)  # the last answer was cut; nobody closes it
            assert "".join(map(chr, tree.token_ids(index))) == text


def test_equal_seeds_give_equal_trees_whatever_the_timing():
    """Slow steps, one worker, single requests or batches: the same nodes; another seed: others."""
    rng, lock = np.random.default_rng(0), threading.Lock()

    def dawdle(event, subject):
        with lock:
            nap = rng.random() * 0.004
        time.sleep(nap)

    plain = nodes(grow(expansions=3))
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle))) == plain
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle), workers=1)) == plain
    assert nodes(grow(expansions=3, make_env=lambda: Walk(dawdle), agent=Talker(False, 0.01))) == plain
    assert nodes(grow(expansions=3, seed=1)) != plain


def test_a_task_plays_the_same_whoever_is_played_beside_it():
    """Trees depend on a task's place, not on the others' counts."""
    assert nodes(grow(counts=(3, 0, 4)))[2] == nodes(grow(counts=(0, 5, 4)))[2]


def test_a_batched_agent_is_asked_for_all_live_branches_at_once_in_canonical_order():
    """The first call holds the first turn of every root; seeds come in the order of the tree."""
    sizes = []
    agent = Talker(hook=lambda requests: sizes.append(len(requests)))
    collection = grow(agent=agent, expansions=2)
    assert sizes[0] == 9 and sizes[1] >= 9  # nobody stops in the first turn
    first = [request.messages[1].content for request in agent.requests[:9]]
    assert first == sorted(first)
    assert sum(sizes) == collection.cost.turns


def test_continuations_start_from_the_restored_state_and_share_the_prefix():
    """A continuation hangs under its anchor and goes on with the numbers that were drawn up to there."""
    trees = grow(expansions=4).trees
    born = [(tree, node) for tree in trees for node in tree.nodes[1:] if node.birth != ROOT]
    assert born
    starts = [(tree, node) for tree, node in born if node.parent == node.birth]
    assert starts
    for tree, node in born:
        assert node.birth in tree.path(node.parent)
    for tree in trees:
        for index, node in enumerate(tree.nodes):
            if node.status == "open" and index != ROOT:
                numbers = json.loads(node.messages[-1].content)
                assert len(numbers) == len(tree.path(index)) - 1
                before = tree.nodes[node.parent]
                assert numbers[:-1] == (json.loads(before.messages[-1].content) if node.parent != ROOT else [])


def test_siblings_are_independent():
    """No two requests have the same seed, and no two branches the same world."""
    agent = Talker()
    trees = grow(agent=agent, expansions=4, counts=(6, 6, 6)).trees
    assert len({request.seed for request in agent.requests}) == len(agent.requests)
    drawn = Counter(
        (tree.task_id, len(tree.path(i)), node.messages[-1].content)
        for tree in trees
        for i, node in enumerate(tree.nodes)
        if i != ROOT and node.status == "open"
    )
    assert max(drawn.values()) == 1


def test_every_step_plays_new_worlds():
    """The step is part of every seed."""
    with collector() as made:
        first, second, again = (asyncio.run(made.grow(TASKS, [2, 2, 2], step=step)) for step in (0, 1, 0))
    assert nodes(first) == nodes(again) != nodes(second)
    assert second.trees[0].step == 1


def test_kept_states_restore_to_their_node():
    """The restored conversation is the path's; without keep_states no node holds a state."""
    collection = grow(expansions=2, keep_states=True)
    env = Walk()
    for tree in collection.trees:
        for index in range(1, len(tree)):
            state = tree.nodes[index].state
            load_state(env, type(state).from_bytes(state.to_bytes()))
            spoken = [message.to_dict() for i in tree.path(index) for message in tree.nodes[i].messages]
            assert env.info()["messages"] == spoken
    assert all(node.state is None for tree in nodes(grow(expansions=2)) for node in tree)
