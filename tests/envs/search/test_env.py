"""Every rule on the manual page of HotpotQASearch, and what a hostile agent may try."""

import json
import math

import gymnasium
import numpy as np
import pytest

import trace_gym
from trace_gym.chat import render_tool_call
from trace_gym.envs.search import env as search_env
from trace_gym.envs.search.demonstrator import next_move, query_key
from trace_gym.envs.search.env import MAX_CALLS, SEARCH_TOOL, HotpotQASearchEnv
from trace_gym.envs.search.observation import Tokens, format_hits
from trace_gym.envs.search.retrieval import Hit
from trace_gym.envs.search.tasks import Question, bundled_questions
from trace_gym.envs.search.tasks.renaming import Renaming
from trace_gym.errors import BadInputError, InfrastructureError, StateError
from trace_gym.messages import ToolCall
from trace_gym.snapshot import EnvState, clone, load_state, save_state

FORMATS = ("hermes", "react", "llama_json")
BRIDGE = "bridge-3-0000"


class Shelf:
    """A search engine that one can watch and break: it finds passages whose title stands in the query."""

    size = 3

    def __init__(self, fingerprint="shelf 1"):
        self.fingerprint = fingerprint
        self.asked = []
        self.is_broken = False
        self.passages = {
            "Emma": "Emma is a novel by Jane Austen.",
            "Jane Austen": "Jane Austen was born in Steventon in 1775.",
            "Bath": "Bath is a city.",
        }

    def search(self, queries, k=3):
        if self.is_broken:
            raise InfrastructureError("retrieval", "the shelf fell over")
        self.asked.append((list(queries), k))
        return [[Hit(t, 1.0, t, text) for t, text in self.passages.items() if t in query][:k] for query in queries]

    def close(self):
        pass


@pytest.fixture
def shelf(monkeypatch):
    """The engine behind every environment of the test."""
    found = Shelf()
    monkeypatch.setattr(search_env, "open_retriever", lambda *args, **options: found)
    return found


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.jsonl"
    records = [
        {
            "question": "Where was the author of Emma born?",
            "golden_answers": ["Steventon"],
            "supporting_titles": ["Emma", "Jane Austen"],
        },
        {"question": "Is Bath a city?", "golden_answers": ["yes"]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def make(data, **options):
    env = HotpotQASearchEnv(data=data, **{"corpus": "shelf", **options})
    env.reset(seed=0, options={"task_id": "questions-000001"})
    return env


def call(*queries, tool_format="hermes"):
    return "\n".join(render_tool_call(ToolCall("search", {"query": q}), tool_format, (SEARCH_TOOL,)) for q in queries)


def bundled(**options):
    return HotpotQASearchEnv(**{"backend": "embedded", **options})


# Searching.


def test_a_search_shows_the_passages(shelf, data):
    env = make(data)
    observation, reward, terminated, truncated, info = env.step(f"Who wrote it? {call('Emma')}")
    assert observation == "Doc 1(Title: Emma) Emma is a novel by Jane Austen."
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["messages"][-1] == {"role": "tool", "content": observation, "name": "search"}
    assert shelf.asked == [(["Emma"], 3)]
    assert (info["searches"], info["supporting_recall"], info["tool_calls"], info["tool_errors"]) == (1, 0.5, 1, 0)
    assert "action_error" not in info and "f1" not in info


@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_format_searches_and_answers(shelf, data, tool_format):
    env = make(data, tool_format=tool_format)
    env.step(call("Emma", tool_format=tool_format))
    *_, info = env.step(call("Jane Austen", tool_format=tool_format))
    assert info["supporting_recall"] == 1.0
    _, reward, terminated, _, info = env.step("<answer> Steventon </answer>")
    assert (reward, terminated, info["outcome"]["verdict"], info["f1"]) == (1.0, True, "correct", 1.0)


def test_react_speaks_as_search_r1_does(shelf, data):
    """One message with its prompt; results stand between tags; no tools are announced beside it."""
    env = make(data, tool_format="react")
    (message,) = env.info()["messages"]
    assert message["role"] == "user" and message["content"].endswith("Question: Where was the author of Emma born?\n")
    assert "<search> query </search>" in message["content"] and env.info()["tools"] == []
    observation, *_ = env.step("<think> Who wrote it? </think>\n<search> Emma </search>")
    assert observation == "<information>Doc 1(Title: Emma) Emma is a novel by Jane Austen.</information>"


@pytest.mark.parametrize(
    "text", ["Action: Finish[Steventon]", "Thought: so.\nFinal Answer: Steventon", "<answer>Steventon</answer>"]
)
def test_react_answers_in_any_of_its_styles(shelf, data, text):
    env = make(data, tool_format="react")
    assert env.step(text)[1] == 1.0


def test_several_queries_in_one_turn_are_one_request(shelf, data):
    env = make(data, topk=2)
    observation, *_, info = env.step(call("Emma", "Bath", "nothing"))
    assert shelf.asked == [(["Emma", "Bath", "nothing"], 2)]
    assert [message["content"][:20] for message in info["messages"][-3:]] == [
        *("Doc 1(Title: Emma) E", "Doc 1(Title: Bath) B", "No passage found.")
    ]
    assert observation.count("Doc 1") == 2


def test_a_repeated_query_is_answered_and_marked(shelf, data):
    """However it is spelled, and within one turn too."""
    env = make(data)
    env.step(call("Emma"))
    first, *_ = env.step(call("emma  "))
    assert first.startswith("This was searched before.\n")
    both, *_, info = env.step(call("Bath", "Bath"))
    assert both.count("This was searched before.") == 1 and info["searches"] == 4


def test_the_number_of_searches_can_be_limited(shelf, data):
    """Beyond the limit nothing is searched, and the agent is told to answer."""
    env = make(data, max_searches=2)
    observation, *_, info = env.step(call("Emma", "Bath", "Jane Austen"))
    assert observation.endswith("Error: All 2 searches are used up. Answer now.")
    assert (info["searches"], info["tool_errors"]) == (2, 1) and "action_error" not in info
    *_, info = env.step(call("Jane Austen"))
    assert info["action_error"] == "no_search_left" and len(shelf.asked) == 1
    assert env.step("<answer>Steventon</answer>")[1] == 1.0


def test_calls_beyond_the_limit_of_a_turn_are_answered_once(shelf, data):
    env = make(data)
    observation, *_, info = env.step(call(*["Emma"] * 50))
    assert info["tool_calls"] == MAX_CALLS and observation.count("Error") == 1


def test_passages_share_the_budget_of_characters():
    """Cut at a word, in order; what a short one leaves goes to the others."""
    long = "word " * 100
    hits = [Hit("a", 1.0, "A", "short"), Hit("b", 0.5, "B", long), Hit("c", 0.1, "C", long)]
    text = format_hits(hits, 220)
    lines = text.split("\n")
    assert lines[0] == "Doc 1(Title: A) short"
    assert all(line.endswith("word…") for line in lines[1:])
    assert 150 < len(text) <= 220 + 5 and abs(len(lines[1]) - len(lines[2])) < 10
    assert format_hits(hits, 10_000).endswith("word") and format_hits([], 10) == ""
    assert format_hits(hits, 1).count("\n") == 2
    assert format_hits([Hit("a", 1.0, "A", "two\nlines\u2028here")], 100) == "Doc 1(Title: A) two lines here"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer that learned a few words."""
    pytest.importorskip("transformers")
    from trace_gym.training.policy import PolicyShape, build_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    text = "Doc 1(Title: Emma) Emma is a novel by Jane Austen."
    build_tokenizer([text] * 3, PolicyShape(), splits_words=True).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow  # imports the library
def test_passages_share_a_budget_of_tokens(shelf, data, tokenizer):
    """As many as the tokenizer counts, whatever their characters; a clone counts alike."""
    from transformers import AutoTokenizer

    measure = Tokens(AutoTokenizer.from_pretrained(tokenizer))
    hits = [Hit(title, 1.0, title, "é漢 word " * 40) for title in "ABC"]
    for budget in (30, 100):
        shown = format_hits(hits, budget, measure)
        assert 0.8 * budget < measure.length(shown) <= budget + measure.length("…") + shown.count("\n")
    assert format_hits(hits, 10**6, measure) == format_hits(hits, 10**6)
    env = make(data, observation_tokens=7, tokenizer=tokenizer)
    shown = clone(env, 1)[0].step(call("Emma"))[0]
    assert shown == env.step(call("Emma"))[0] and shown.endswith("…") and measure.length(shown[:-1]) <= 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"observation_tokens": 5}, "go together"),
        ({"tokenizer": "x"}, "go together"),
        ({"observation_tokens": 0, "tokenizer": "x"}, "at least 1"),
    ],
)
def test_tokens_need_their_tokenizer(data, options, said):
    with pytest.raises(BadInputError, match=said):
        HotpotQASearchEnv(data=data, **options)


@pytest.mark.slow  # imports the library
def test_a_tokenizer_that_is_none_is_refused_in_one_line(data, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=r"cannot be loaded.*observation_chars") as caught:
        HotpotQASearchEnv(data=data, observation_tokens=5, tokenizer=str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)


# Answers.


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer> steventon. </answer>", 1.0),
        ("It must be <answer>Steventon</answer>, surely.", 1.0),
        ("<answer>Steventon</answer><answer>Bath</answer>", 1.0),
        ("<answer>Bath</answer><answer>Steventon</answer>", 0.0),
        ("<answer>Steventon or Bath</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>" + "Steventon " * 10_000 + "</answer>", 0.0),
    ],
)
def test_the_first_answer_is_graded_by_exact_match(shelf, data, text, reward):
    env = make(data, max_action_chars=10**6)
    observation, given, terminated, truncated, info = env.step(text)
    assert (observation, given, terminated, truncated) == ("", reward, True, False)
    assert info["outcome"]["verdict"] == ("correct" if reward else "wrong")
    assert 0 <= info["f1"] <= 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Steventon", "no_action"),
        ("", "no_action"),
        ("<answer>Steventon", "unclosed_answer"),
        ("<think><answer>Steventon</answer></think>", "no_action"),
        ("<tool_call>\n{broken\n</tool_call><answer>Steventon</answer>", "invalid_json"),
        ("<tool_response>Steventon!</tool_response><answer>Steventon</answer>", "invented_result"),
        ('<tool_call>\n{"name": "find", "arguments": {"query": "x"}}\n</tool_call>', "unknown_tool"),
        ('<tool_call>\n{"name": "search", "arguments": {"query": ["x"]}}\n</tool_call>', "bad_arguments"),
        ('<tool_call>\n{"name": "search"}\n</tool_call>', "bad_arguments"),
    ],
)
def test_what_is_no_action_is_told_so(shelf, data, text, kind):
    """The agent reads what was wrong; the turn counts, and nothing is searched or graded."""
    env = make(data)
    observation, reward, terminated, _, info = env.step(text)
    assert observation.startswith("Error: ") and (reward, terminated) == (0.0, False)
    assert (info["action_error"], info["turn"], info["searches"]) == (kind, 1, 0)
    assert not shelf.asked and math.copysign(1, reward) == 1


def test_an_answer_beside_a_call_is_none(shelf, data):
    """The result was not seen yet."""
    env = make(data)
    _, reward, terminated, _, info = env.step(call("Emma") + "<answer>Steventon</answer>")
    assert (reward, terminated, info["searches"]) == (0.0, False, 1)


def test_a_penalty_for_bad_turns_leaves_the_outcome_alone(shelf, data):
    """The last turn's reward is the outcome, a bad turn's as well: evaluations and the trainer go by it."""
    env = make(data, format_penalty=0.25, max_bad_actions=2)
    assert [env.step("hm")[1] for _ in range(2)] == [-0.25, 0.0]
    assert env.info()["outcome"]["verdict"] == "wrong"
    env.reset(seed=0, options={"task_id": "questions-000001"})
    assert env.step("hm")[1] == -0.25
    assert env.step(call("Emma"))[1] == 0.0
    _, reward, *_, info = env.step("<answer>Steventon</answer>")
    assert (reward, info["outcome"]["verdict"]) == (1.0, "correct")


def test_patience_and_turns_end(shelf, data):
    env = make(data, max_bad_actions=2, max_turns=3)
    env.step("hm")
    _, _, terminated, _, info = env.step("hm")
    assert terminated and info["outcome"]["verdict"] == "wrong"
    env.reset(options={"task_id": "questions-000001"})
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step(call("Emma"))
    assert (reward, terminated, truncated, info["outcome"]["verdict"]) == (0.0, False, True, "wrong")


@pytest.mark.parametrize(
    "query", ["", " ", "AND (", "title:", "*", "a" * 10_000, "\x00\x1b[2J", "\ud800", "\"' OR 1=1 --", "🜁"]
)
def test_any_query_is_plain_text(query):
    """Nothing in a query is an operator; half characters become question marks."""
    with bundled() as env:
        env.reset(seed=0)
        observation, reward, terminated, _, info = env.step(call(query))
        assert (reward, terminated) == (0.0, False) and "failure" not in info
        assert env.observation_space.contains(observation) and observation
        observation.encode()


# Failures.


def test_a_dead_engine_is_a_failure_and_no_wrong_answer(shelf, data):
    env = make(data)
    env.step(call("Emma"))
    state = save_state(env)
    shelf.is_broken = True
    observation, reward, terminated, truncated, info = env.step(call("Jane Austen"))
    assert math.isnan(reward) and (observation, terminated, truncated) == ("", False, True)
    assert info["failure"] == {"kind": "retrieval", "reason": "the shelf fell over"} and "outcome" not in info
    shelf.is_broken = False
    load_state(env, state)
    assert "Steventon" in env.step(call("Jane Austen"))[0]


def test_an_engine_that_cannot_start_fails_the_reset(data, monkeypatch):
    def refuse(*args, **options):
        raise InfrastructureError("retrieval", "no server at http://127.0.0.1:1")

    monkeypatch.setattr(search_env, "open_retriever", refuse)
    with (
        HotpotQASearchEnv(data=data, backend="http", corpus="http://127.0.0.1:1") as env,
        pytest.raises(InfrastructureError),
    ):
        env.reset(seed=0)


def test_a_state_of_another_engine_is_refused(shelf, data):
    """The error names both."""
    env = make(data)
    env.step(call("Emma"))
    state = save_state(env)
    shelf.fingerprint = "shelf 2"
    with pytest.raises(StateError, match=r"another search engine or corpus: shelf 1; here it is shelf 2"):
        load_state(env, EnvState.from_bytes(state.to_bytes()))


def test_a_state_of_other_settings_of_the_engine_is_refused():
    with bundled() as env, bundled(backend_options={"k1": 1.2, "b": 0.75}) as other:
        env.reset(seed=0)
        with pytest.raises(StateError, match="same backend"):
            load_state(other, save_state(env))


# States.


def test_a_state_knows_what_was_searched(shelf, data):
    """Marks of repeated queries, recall and F1 come out the same after bytes."""
    env, other = make(data), make(data)
    env.step(call("Emma"))
    load_state(other, EnvState.from_bytes(save_state(env).to_bytes()))
    assert other.info() == env.info()
    assert other.step(call("Emma"))[0].startswith("This was searched before.")
    env.step("<answer>Bath</answer>")
    load_state(other, EnvState.from_bytes(save_state(env).to_bytes()))
    assert other.info()["f1"] == 0.0 and other.info()["outcome"]["verdict"] == "wrong"


def test_clones_share_the_engine_and_nothing_else(shelf, data):
    env = make(data)
    env.step(call("Emma"))
    first, second = clone(env, 2)
    first.step(call("Bath"))
    env.close()
    assert (first.info()["searches"], second.info()["searches"]) == (2, 1)
    assert "Steventon" in second.step(call("Jane Austen"))[0]


def test_the_state_holds_no_index():
    """Its size is that of the conversation and a few names."""
    with bundled() as env:
        env.reset(seed=0)
        env.step(call("Emma"))
        state = save_state(env)
        transcript = sum(len(message["content"]) for message in env.info()["messages"])
        assert len(state.to_bytes()) < 3 * transcript + 4_000


@pytest.mark.slow
def test_the_laws_of_a_snapshot_hold():
    for tool_format in ("hermes", "react"):
        kwargs = {"backend": "embedded", "tool_format": tool_format, "demonstrator_skill": 0.7}
        env = gymnasium.make("trace_gym/HotpotQASearch-v0", **kwargs)
        laws = trace_gym.check_snapshot(env, cycles=100)
        env.close()
        assert all(law.holds for law in laws), "\n".join(map(str, laws))


# Questions.


def test_the_same_seed_gives_the_same_question():
    with bundled() as env, bundled() as other:
        for seed in range(5):
            assert env.reset(seed=seed)[0] == other.reset(seed=seed)[0]
        assert len({env.reset(seed=seed)[0] for seed in range(20)}) > 10


def test_bundled_questions_can_be_chosen():
    with bundled(difficulties=[3], size=7) as env:
        assert len(env.task_ids) == 7 and all(task_id.startswith("bridge-3") for task_id in env.task_ids)
    with bundled(split="eval", types=["comparison"]) as env:
        assert set(env.task_ids) < set(bundled_questions("eval").ids)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"topk": 0},
        {"observation_chars": 0},
        {"max_searches": -1},
        {"format_penalty": 1.5},
        {"prompt": "Answer!"},
        {"split": "test"},
        {"difficulties": [9]},
        {"types": ["riddle"]},
        {"data": "hotpot"},
        {"tool_format": "morse"},
    ],
)
def test_bad_arguments_are_refused_at_once(options):
    with pytest.raises(BadInputError):
        HotpotQASearchEnv(**options)


def test_arguments_for_bundled_questions_are_refused_with_data(data):
    with pytest.raises(BadInputError, match="leave them out with data"):
        HotpotQASearchEnv(data=data, difficulties=[1])


def test_questions_without_passages_need_a_corpus(data):
    with HotpotQASearchEnv(data=data) as env, pytest.raises(BadInputError, match="name a corpus to search"):
        env.reset(seed=0)


def test_passages_that_come_with_the_questions_are_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path / "cache"))
    record = {
        "question": "Who wrote the novel?",
        "answer": "Jane Austen",
        "supporting_facts": [["Emma", 0]],
        "context": [["Emma", ["Emma is a novel.", " It is by Jane Austen."]], ["Bath", ["Bath is a city."]]],
    }
    path = tmp_path / "set.json"
    path.write_text(json.dumps([record]))
    with HotpotQASearchEnv(data=str(path), backend="embedded") as env:
        env.reset(seed=0)
        observation, *_, info = env.step(call("novel"))
    assert observation == "Doc 1(Title: Emma) Emma is a novel. It is by Jane Austen."
    assert info["supporting_recall"] == 1.0


def test_a_prompt_of_ones_own_replaces_the_instructions(shelf, data):
    env = make(data, prompt="Q: {question}", tool_format="react")
    assert env.info()["messages"] == [{"role": "user", "content": "Q: Where was the author of Emma born?"}]


# Demonstrations.


def play(env, task_id, seed=0):
    """Play a demonstration; return its reward, its info and what was said."""
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    over, said = False, []
    while not over:
        said.append(info["demonstration"])
        _, reward, terminated, truncated, info = env.step(said[-1])
        over = terminated or truncated
    return reward, info, said


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_oracle_solves_bundled_questions_by_searching(tool_format):
    """All supporting passages are found before it answers."""
    with bundled(demonstrator_skill=1.0, tool_format=tool_format) as env:
        for task_id in env.task_ids[:30]:
            reward, info, _ = play(env, task_id)
            assert (reward, info["supporting_recall"]) == (1.0, 1.0), task_id


@pytest.mark.slow
def test_the_oracle_solves_every_bundled_question():
    """In either split, at the default three passages per query."""
    for split in ("train", "eval"):
        with bundled(split=split, demonstrator_skill=1.0) as env:
            lost = [task_id for task_id in env.task_ids if play(env, task_id)[0] != 1.0]
        assert not lost


def test_the_bridge_is_searched_for_once_it_was_read():
    """The first query names what the question names; the second what the first passage told."""
    with bundled(demonstrator_skill=1.0) as env:
        question = env.questions.get(BRIDGE)
        _, _, said = play(env, BRIDGE)
    first, second = question.supporting_titles
    assert first in said[0] and second not in said[0] and second in said[1]
    assert said[-1] == f"<answer> {question.golden_answers[0]} </answer>"


def test_a_search_in_vain_is_tried_in_other_words():
    """First by name, then by the whole question, then by the full title, then the oracle answers."""
    question = Question("x", "Who made Emma?", ("J",), ("Emma (novel)",))
    queries = []
    while (move := next_move(question, queries, (), (), np.random.default_rng(0), 1.0)).query is not None:
        queries.append(query_key(move.query))
    assert queries == ["emma", "who made emma?", "emma (novel)"] and move.answer == "J"


def test_skill_dials_the_success():
    """More skill, more right answers; none at 0; slips are searches for something else and wrong answers."""
    rates = []
    for skill in (0.0, 0.5, 0.8):
        with bundled(demonstrator_skill=skill, max_turns=8) as env:
            rates.append(np.mean([play(env, task_id, seed)[0] for seed, task_id in enumerate(env.task_ids[:60])]))
    assert rates[0] == 0.0 and 0.1 < rates[1] < 0.6 < rates[2] < 0.95


def test_demonstrations_are_a_function_of_the_seed():
    with bundled(demonstrator_skill=0.5) as env:
        first = [play(env, task_id, seed=3)[2] for task_id in env.task_ids[:10]]
        assert first == [play(env, task_id, seed=3)[2] for task_id in env.task_ids[:10]]
        assert first != [play(env, task_id, seed=4)[2] for task_id in env.task_ids[:10]]


def test_wrong_answers_of_slips_are_wrong():
    """Whatever the answer is: a name, a year, yes or no."""
    rng = np.random.default_rng(0)
    for question in list(bundled_questions("train").questions())[:200]:
        read = ["Doc 1(Title: A) It was in Rome, in 1850, that Jane Doe met John Roe."]
        move = next_move(question, ["x"], question.supporting_titles, read, rng, 0.0)
        assert move.answer is not None and not search_env.exact_match(move.answer, question.golden_answers)


def test_questions_without_supporting_titles_have_no_demonstrations(shelf, data):
    with pytest.raises(BadInputError, match="no demonstrations"):
        HotpotQASearchEnv(data=data, corpus="x", demonstrator_skill=1.0).reset(options={"task_id": "questions-000002"})


def test_the_first_passages_show_what_a_small_policy_needs():
    """With one passage of 200 characters a query, the oracle's observations hold nearly all answers it gives."""
    options = {"topk": 1, "observation_chars": 200, "difficulties": [3]}
    with bundled(demonstrator_skill=1.0, **options) as env:
        shown = []
        for task_id in env.task_ids[:100]:
            _, info, _ = play(env, task_id)
            answer = env.questions.get(task_id).golden_answers[0]
            shown.append(any(answer in m["content"] for m in info["messages"] if m["role"] == "tool"))
    assert np.mean(shown) > 0.85


# Other names.


def test_renamed_things_are_found_and_answered_by_their_shown_names():
    """Question, passages and answer agree, and nothing known by heart helps; a clone and a state keep the names."""
    with bundled(renamed=True, topk=1, tool_format="react") as env:
        question = next(
            q for q in env.questions.questions() if q.question.startswith("Where was the author of the book")
        )
        for seed in range(10):
            _, info = env.reset(seed=seed, options={"task_id": question.task_id})
            names = Renaming(env._current().world.names)
            first, second = (names.show(title) for title in question.supporting_titles)
            assert first in info["messages"][0]["content"] and first != question.supporting_titles[0]
            shown = env.step(f"<search> {first} </search>")[0]
            assert f"(Title: {first})" in shown and second in shown
            answer = names.show(question.golden_answers[0])
            (other,) = clone(env, 1)
            assert other.step(f"<answer> {answer} </answer>")[1] == 1.0
            other.close()
            load_state(env, EnvState.from_bytes(save_state(env).to_bytes()))
            env.step(f"<search> {second} </search>")
            assert env.info()["supporting_recall"] == 1.0
            by_heart = question.golden_answers[0]
            assert env.step(f"<answer> {by_heart} </answer>")[1] == float(answer == by_heart)


def test_the_oracle_solves_renamed_questions():
    with bundled(renamed=True, demonstrator_skill=1.0) as env:
        rewards = [play(env, task_id, seed=number)[0] for number, task_id in enumerate(env.task_ids[:60])]
    assert np.mean(rewards) > 0.9
