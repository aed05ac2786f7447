"""The endpoint agent against a small server that speaks the protocol, well and badly."""

import asyncio
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium
import pytest

from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError
from trace_gym.evaluate import evaluate
from trace_gym.messages import Message, Request, ToolCall
from trace_gym.tool_formats import TOOL_FORMATS, parse_tool_calls, render_tool_call

pytest.importorskip("openai")
from trace_gym.agents.openai import OpenAIAgent

TOOL = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
ASK = (Message("system", "Be brief."), Message("user", "1+1?"))
CALL = ToolCall("python", {"code": "print('ä')"})


def completion(content="2", finish="stop", tokens=7, **message):
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": content, **message},
    }
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


class Server(ThreadingHTTPServer):
    """Answers with what `script` returns for a body: (status, bytes or JSON)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.script = [], lambda body: (200, completion())
        self.running, self.most_running = 0, 0
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        """A client that hung up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            status, answer = self.server.script(body)
        finally:
            with self.server.lock:
                self.server.running -= 1
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Stay quiet."""


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def agent(server, **options):
    return OpenAIAgent("m", f"http://127.0.0.1:{server.server_port}/v1", **options)


def answer(made, *requests):
    return asyncio.run(made.complete(requests))


def test_an_answer_carries_text_and_counted_tokens(server):
    """Text and usage come through; there are no token ids and no log-probabilities."""
    (found,) = answer(agent(server), Request(ASK))
    assert (found.text, found.num_tokens, found.finish_reason) == ("2", 7, "stop")
    assert found.token_ids is None and found.logprobs is None


def test_options_and_the_lower_limit_are_sent(server):
    """The request's max_tokens lowers the agent's; seed, temperature and further fields are passed on."""
    made = agent(server, temperature=0.5, max_tokens=100, parameters={"top_p": 0.9})
    answer(made, Request(ASK, (TOOL,), max_tokens=20, seed=11))
    (body,) = server.bodies
    assert body["max_tokens"] == 20 and body["seed"] == 11
    assert body["temperature"] == 0.5 and body["top_p"] == 0.9 and body["model"] == "m"
    assert body["tools"] == [TOOL]
    assert body["messages"] == [m.to_dict() for m in ASK]
    answer(agent(server, send_seed=False), Request(ASK))
    assert not {"seed", "tools", "max_tokens", "temperature"} & set(server.bodies[-1])


def test_native_calls_come_back_as_text_that_the_environment_parses(server):
    """One form for environments, whatever the endpoint speaks."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "python", "arguments": json.dumps(CALL.arguments)},
    }
    server.script = lambda body: (200, completion("Let me see.", "tool_calls", tool_calls=[call, call]))
    (found,) = answer(agent(server), Request(ASK, (TOOL,)))
    assert found.text.startswith("Let me see.\n")
    assert parse_tool_calls(found.text).calls == (CALL, CALL)
    server.script = lambda body: (200, completion(None, "tool_calls", tool_calls=[call]))
    (found,) = answer(agent(server), Request(ASK, (TOOL,)))
    assert found.text == render_tool_call(CALL)


@pytest.mark.parametrize("raw", ['{"code": ', "[1]", '"x"'])
def test_broken_arguments_reach_the_environment_as_an_error_to_answer(server, raw):
    """Arguments that are no JSON object are the model's mistake, not a crash."""
    call = {"id": "1", "type": "function", "function": {"name": "python", "arguments": raw}}
    server.script = lambda body: (200, completion(None, "tool_calls", tool_calls=[call]))
    (found,) = answer(agent(server), Request(ASK, (TOOL,)))
    parsed = parse_tool_calls(found.text)
    assert not parsed.calls and len(parsed.errors) == 1


def test_own_calls_go_out_natively_with_matching_ids(server):
    """A turn that reads as rendered calls, all answered, is sent as tool_calls and role=tool messages."""
    text = "Think.\n" + render_tool_call(CALL) + "\n" + render_tool_call(CALL)
    results = (Message("tool", "ä", "python"), Message("tool", "b", "python"))
    later = (Message("assistant", "Hm."), Message("user", "go on"))
    answer(agent(server), Request((*ASK, Message("assistant", text), *results, *later), (TOOL,)))
    sent = server.bodies[0]["messages"]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert sent[2]["content"] == "Think."
    assert [json.loads(c["function"]["arguments"]) for c in sent[2]["tool_calls"]] == [dict(CALL.arguments)] * 2
    assert [m["tool_call_id"] for m in sent[3:5]] == [c["id"] for c in sent[2]["tool_calls"]]
    assert sent[2]["tool_calls"][0]["id"] != sent[2]["tool_calls"][1]["id"]
    assert [m["content"] for m in sent[3:5]] == ["ä", "b"]


@pytest.mark.parametrize(
    ("text", "results"),
    [
        (render_tool_call(CALL) + " and then?", [Message("tool", "r", "python")]),
        ("<tool_call>\n{oops\n</tool_call>", [Message("user", "Error: no JSON")]),
        (render_tool_call(CALL) * 2, [Message("tool", "r", "python")]),
        (render_tool_call(CALL), [Message("tool", "r", "python"), Message("tool", "s", "python")]),
        (render_tool_call(ToolCall("no such name!")), [Message("tool", "r", "x")]),
    ],
)
def test_turns_that_are_not_exactly_calls_stay_text(server, text, results):
    """Nothing is lost or invented: the assistant's text is sent as it was, results as user messages."""
    answer(agent(server), Request((*ASK, Message("assistant", text), *results), (TOOL,)))
    sent = server.bodies[0]["messages"]
    assert sent[2] == {"role": "assistant", "content": text}
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "user"]
    assert all(m.content in sent[3]["content"] for m in results)


def test_without_native_tools_everything_is_text(server):
    """Tools are described in the single system message, and users and assistants alternate."""
    turn = (Message("assistant", render_tool_call(CALL)), Message("tool", "2", "python"))
    answer(agent(server, native_tools=False), Request((*ASK, *turn), (TOOL,)))
    (body,) = server.bodies
    assert "tools" not in body
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert '"python"' in body["messages"][0]["content"] and "Be brief." in body["messages"][0]["content"]


@pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")
@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_an_endpoint_is_told_of_one_format_only_and_plays_in_it(server, tool_format):
    """Natively where the format is the endpoint's own; else in words, results included, and by turns."""
    is_native = TOOL_FORMATS[tool_format].is_native
    written = render_tool_call(ToolCall("python", {"code": "6 * 7"}), tool_format)

    def play(body):
        if any(message["role"] == "assistant" for message in body["messages"]):
            return 200, completion("\\boxed{42}")
        call = {"id": "1", "type": "function", "function": {"name": "python", "arguments": '{"code": "6 * 7"}'}}
        return 200, completion(None, tool_calls=[call]) if is_native else completion(f"I look.\n{written}")

    server.script = play
    report = evaluate(
        lambda: gymnasium.make("trace_gym/MathCode-v0", size=15, tool_format=tool_format),
        agent(server),
        ["arithmetic-1-train-000000"],
    )
    assert (report.num_episodes, report.mean_tool_calls, report.mean_tool_errors) == (1, 1, 0)
    first, second = server.bodies
    system = first["messages"][0]["content"]
    assert ("tools" in first) == ("tools" in second) == is_native
    assert ("Variables persist between cells" in system) != is_native
    assert [m["role"] for m in second["messages"]] == [
        *("system", "user", "assistant"),
        "tool" if is_native else "user",
    ]
    assert "42" in second["messages"][3]["content"]
    if not is_native:
        assert second["messages"][2] == {"role": "assistant", "content": f"I look.\n{written}"}
        # What the endpoint sees as a result is what would count as an invention from its own mouth.
        assert "42" not in parse_tool_calls(second["messages"][3]["content"], tool_format).said


def test_a_refusal_is_an_answer(server):
    """Null content is no failure: the refusal's text, or nothing, goes to the environment."""
    server.script = lambda body: (200, completion(None, refusal="I won't."))
    assert answer(agent(server), Request(ASK))[0].text == "I won't."
    server.script = lambda body: (200, completion(None))
    assert answer(agent(server), Request(ASK))[0].text == ""


def test_a_cut_answer_says_so_and_missing_usage_is_estimated(server):
    """finish_reason comes through; without usage, words are counted."""
    reply = completion("one two", "length")
    del reply["usage"]
    server.script = lambda body: (200, reply)
    (found,) = answer(agent(server), Request(ASK))
    assert (found.finish_reason, found.num_tokens) == ("length", 2)


def test_server_errors_are_retried_then_reported(server):
    """Two 500s and a 429 cost nothing; one more than max_retries fails the episode, kind endpoint."""
    replies = iter([(500, {}), (429, {}), (500, {}), (200, completion())])
    server.script = lambda body: next(replies)
    assert answer(agent(server, max_retries=3), Request(ASK))[0].text == "2"
    server.script = lambda body: (500, {"error": {"message": "down"}})
    with pytest.raises(InfrastructureError) as caught:
        answer(agent(server, max_retries=2), Request(ASK))
    assert caught.value.kind == "endpoint"
    assert len(server.bodies) == 4 + 3


@pytest.mark.parametrize(
    "reply", [b"{not json", b"[]", b'"text"', b"{}", b'{"choices": []}', b'{"choices": [{}]}', b"null"]
)
def test_malformed_answers_are_infrastructure_failures(server, reply):
    """Status 200 with nonsense is the endpoint's failure, never an exception of another kind."""
    server.script = lambda body: (200, reply)
    with pytest.raises(InfrastructureError) as caught:
        answer(agent(server, max_retries=0), Request(ASK))
    assert caught.value.kind == "endpoint"


def test_a_slow_endpoint_meets_its_deadline(server):
    """An attempt longer than timeout_s fails, and so does an endpoint that is not there."""
    release = threading.Event()
    server.script = lambda body: (release.wait(5), (200, completion()))[1]
    start = time.monotonic()
    with pytest.raises(InfrastructureError, match="Timeout"):
        answer(agent(server, timeout_s=0.2, max_retries=0), Request(ASK))
    assert time.monotonic() - start < 3
    release.set()
    with pytest.raises(InfrastructureError, match="Connection"):
        answer(OpenAIAgent("m", "http://127.0.0.1:9/v1", max_retries=0), Request(ASK))


def test_a_refused_request_is_an_infrastructure_failure(server):
    """A wrong key or model name is not the model's score."""
    for status in (400, 401, 404):
        server.script = lambda body, status=status: (status, {"error": {"message": "no"}})
        with pytest.raises(InfrastructureError) as caught:
            answer(agent(server), Request(ASK))
        assert caught.value.kind == "endpoint"


def test_a_conversation_too_long_for_the_model_is_cut_by_length(server):
    """The model's context is its own limit, as for a local model: an empty answer, not a failure."""
    error = {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}
    server.script = lambda body: (400, {"error": error})
    (found,) = answer(agent(server), Request((*ASK, Message("assistant", "Hm."), Message("user", "Well?"))))
    assert (found.text, found.finish_reason, found.num_tokens) == ("", "length", 0)


def test_a_first_prompt_too_long_for_the_model_is_a_failure(server):
    """Nobody said anything yet, so nobody is scored."""
    error = {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}
    server.script = lambda body: (400, {"error": error})
    with pytest.raises(InfrastructureError) as caught:
        answer(agent(server), Request(ASK))
    assert caught.value.kind == "context"


def test_answers_keep_their_order_and_concurrency_is_bounded(server):
    """Requests run side by side, never more than max_concurrency, and come back in order."""

    def echo(body):
        time.sleep(0.03)
        return 200, completion(body["messages"][0]["content"])

    server.script = echo
    made = agent(server, max_concurrency=3)
    wanted = [Request((Message("user", str(i)),)) for i in range(10)]
    assert [c.text for c in answer(made, *wanted)] == [str(i) for i in range(10)]
    assert 2 <= server.most_running <= 3


def test_one_agent_serves_several_event_loops(server):
    """Evaluations one after another may each run a loop of their own."""
    made = agent(server, max_concurrency=1)
    for _ in range(3):
        assert len(answer(made, Request(ASK), Request(ASK), Request(ASK))) == 3


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"max_concurrency": 0}, {"max_retries": -1}])
def test_options_out_of_range_are_refused(options):
    """Bad options are named when the agent is made."""
    with pytest.raises(BadInputError, match="max_concurrency"):
        OpenAIAgent("m", api_key="k", **options)


def test_a_missing_key_or_package_is_named(monkeypatch):
    """The message says what to set or install."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(BadInputError, match="OPENAI_API_KEY"):
        OpenAIAgent("m")
    monkeypatch.setattr("trace_gym.errors.importlib.import_module", _absent)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[openai\]"):
        OpenAIAgent("m", api_key="k")


def _absent(name):
    raise ModuleNotFoundError(name)
