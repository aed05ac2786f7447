"""Laws of vLLM as an agent, with a CPU build of it: exact ids and log-probabilities, nothing read twice, no waiting."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from trace_gym.agents import make_agent
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Message, Request

pytest.importorskip("vllm", reason="vLLM is not installed; 'make vllm' installs a CPU build and runs this")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "block_size": 32}
START_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with random weights that are far from uniform."""
    from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

    shape = PolicyShape(hidden=64, layers=2, heads=2, mlp=64, vocabulary=300, context=256)
    tokenizer = build_tokenizer(["some words to learn"], shape)
    model = build_model(tokenizer, shape, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return make_agent("transformers", name_or_path=folder, device="cpu", temperature=0.7)


@pytest.fixture(scope="module")
def local(folder, environment):
    return make_agent("vllm", name_or_path=folder, engine=ENGINE, temperature=0.7, max_tokens=60)


@pytest.fixture(scope="module")
def served(folder, environment):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--dtype float32 --enforce-eager --max-model-len 256 --block-size 32 --logprobs-mode processed_logprobs"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *flags.split()]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield make_agent(
            "vllm_server",
            name_or_path=folder,
            base_url=f"http://127.0.0.1:{port}",
            connection_timeout_s=START_S,
            temperature=0.7,
            max_tokens=60,
        )
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(params=["local", "served"])
def agent(request):
    return request.getfixturevalue(request.param)


def some_ids(num, rng):
    return tuple(rng.randrange(8, 260) for _ in range(num))


def some_requests(num, seed=0):
    rng = random.Random(seed)
    return [Request((), prompt_ids=some_ids(20 + i, rng), seed=i, max_tokens=3 + 6 * i) for i in range(num)]


def scored(reference, prompt_ids, answer_ids):
    """Log-probabilities of an answer from one plain forward pass of transformers."""
    with torch.inference_mode():
        logits = reference.model(torch.tensor([[*prompt_ids, *answer_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = (logits.float() / reference.temperature).log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(answer_ids)[:, None])[:, 0].numpy()


def test_log_probabilities_are_those_of_transformers(agent, reference):
    """Of the very ids that were sampled, at the temperature of sampling, to 1e-4."""
    wanted = some_requests(8)
    answers = asyncio.run(agent.complete(wanted))
    for request, answer in zip(wanted, answers, strict=True):
        expected = scored(reference, request.prompt_ids, answer.token_ids)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        ended = answer.token_ids[-1] == agent.encoder.eos_id
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or answer.num_tokens == request.max_tokens
        assert agent.encoder.eos_id not in answer.token_ids[:-1]


def test_an_answer_is_that_of_the_request_alone(agent):
    """Seeds decide, not who else is answered or what is cached; another seed says something else."""
    wanted = some_requests(6)
    together = asyncio.run(agent.complete(wanted))
    alone = [asyncio.run(agent.complete([request]))[0] for request in reversed(wanted)][::-1]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    prompt = wanted[0].prompt_ids
    others = asyncio.run(agent.complete([Request((), prompt_ids=prompt, seed=s, max_tokens=9) for s in range(9)]))
    assert len({answer.token_ids for answer in others}) > 4


def test_messages_are_rendered_and_limits_kept(agent):
    """Without prompt ids the chat template speaks; the context is never exceeded; nothing is asked without room."""
    rng = random.Random(1)
    wanted = [
        Request((Message("user", "hello"),), max_tokens=5),
        Request((), prompt_ids=some_ids(250, rng), max_tokens=60),
        Request((), prompt_ids=some_ids(256, rng), max_tokens=60),
    ]
    spoken, cut, empty = asyncio.run(agent.complete(wanted))
    assert 1 <= spoken.num_tokens <= 5
    assert 1 <= cut.num_tokens <= 6
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", (), "length")
    with pytest.raises(BadInputError, match="needs a prompt"):
        asyncio.run(agent.complete([Request((), prompt_ids=())]))


def test_a_known_prefix_is_not_read_again(local):
    """The next turn and a fork read what is new, up to a block of the cache."""
    rng = random.Random(2)

    async def play():
        generation = local.generation()
        start = some_ids(150, rng)

        async def ask(ids):
            before, found = generation.num_read, {}
            asked = [((0, 0), Request((), prompt_ids=ids, seed=3, max_tokens=20))]
            while not found:
                await generation.burst(asked, found.__setitem__)
                asked = []
            return ids + found[0, 0].token_ids, generation.num_read - before

        first, read = await ask(start)
        assert read == 150
        _, read = await ask(first + some_ids(5, rng))
        assert read <= len(first) - 150 + 5 + 32
        _, read = await ask(start[:140] + some_ids(10, rng))
        assert read <= 10 + 32

    asyncio.run(play())


def test_short_answers_leave_while_a_long_one_goes_on(local):
    """An answer is given away at once, and the burst ends while the long one is still being decoded."""
    rng = random.Random(4)
    lengths = [60, 2, 2, 2]
    asked = [((0, i), Request((), prompt_ids=some_ids(9, rng), seed=i, max_tokens=n)) for i, n in enumerate(lengths)]
    order = []

    async def play():
        generation = local.generation()
        await generation.burst(asked, lambda key, answer: order.append(key))
        early = list(order)
        while len(order) < 4:
            await generation.burst([], lambda key, answer: order.append(key))
        return early

    early = asyncio.run(play())
    assert early and (0, 0) not in early
    assert sorted(order) == [(0, i) for i in range(4)]


def test_a_failed_burst_leaves_nothing_in_the_engine(local, monkeypatch):
    """It is an infrastructure failure; the next request is answered as ever."""
    request = some_requests(1)[0]
    expected = asyncio.run(local.complete([request]))
    with monkeypatch.context() as patch:
        patch.setattr(local._engine, "step", lambda: torch.empty(1 << 60))
        with pytest.raises(InfrastructureError, match="generation"):
            asyncio.run(local.complete(some_requests(3, seed=5)))
    assert not local._engine.has_unfinished_requests()
    assert asyncio.run(local.complete([request]))[0].token_ids == expected[0].token_ids


def test_a_prefix_that_could_not_be_read_is_not_taken_for_known(local, reference, monkeypatch):
    """A forward pass that fails leaves places for keys and values that were never written."""
    prompt = some_ids(150, random.Random(6))
    wanted = [Request((), prompt_ids=prompt, seed=i, max_tokens=8) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(local._engine.model_executor, "execute_model", lambda *_, **__: torch.empty(1 << 60))
        with pytest.raises(InfrastructureError, match="generation"):
            asyncio.run(local.complete(wanted))
    for answer in asyncio.run(local.complete(wanted)):
        np.testing.assert_allclose(answer.logprobs, scored(reference, prompt, answer.token_ids), atol=1e-4)


def test_those_who_ask_at_the_same_time_are_all_answered(agent):
    """Each gets what is theirs, the same as alone."""
    wanted = some_requests(6)
    alone = asyncio.run(agent.complete(wanted))

    async def ask():
        parts = [agent.complete([request]) for request in wanted]
        return await asyncio.wait_for(asyncio.gather(*parts), 60)

    assert [answer.token_ids for (answer,) in asyncio.run(ask())] == [answer.token_ids for answer in alone]


def test_who_is_not_waited_for_leaves_the_engine(local):
    """An answer that missed its deadline is given up: nothing fills the engine, and its cache can be emptied."""
    request = Request((), prompt_ids=some_ids(150, random.Random(7)), seed=0, max_tokens=60)
    expected = asyncio.run(local.complete([request]))

    async def give_up():
        async with asyncio.timeout(0.01):
            await local.complete([request])

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert not local._engine.has_unfinished_requests()
    assert local._engine.reset_prefix_cache()
    assert asyncio.run(local.complete([request]))[0].token_ids == expected[0].token_ids


def test_an_answer_that_the_engine_gives_up_is_no_answer(local, monkeypatch):
    """It is an infrastructure failure, and not a short answer."""
    step = local._engine.step

    def give_up():
        outputs = step()
        for output in outputs:
            output.outputs[0].finish_reason = "abort"
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(local._engine, "step", give_up)
        with pytest.raises(InfrastructureError, match="abort"):
            asyncio.run(local.complete(some_requests(2)))
    assert not local._engine.has_unfinished_requests()


def test_no_server_is_an_infrastructure_failure(folder):
    """Named in one line, not a stack of connections."""
    with pytest.raises(InfrastructureError, match="can't be reached"):
        make_agent("vllm_server", name_or_path=folder, base_url=f"http://127.0.0.1:{int(time.time()) % 1000 + 1}")
