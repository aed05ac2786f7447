"""A corpus of a few pages with a question about each, and a tiny training job on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGES = 24


class Pages(NamedTuple):
    """The files of a corpus and of questions about it."""

    corpus: Path
    questions: Path


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Page n tells of word n; each question asks about one page."""
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path / "cache"))
    found = Pages(tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl")
    for path, rows in (
        (found.corpus, [{"id": f"p{n}", "contents": f"Page {n}\nword{n} is on it."} for n in range(PAGES)]),
        (
            found.questions,
            [
                {
                    "question": f"What is on Page {n}?",
                    "golden_answers": [f"word{n}"],
                    "supporting_titles": [f"Page {n}"],
                }
                for n in range(PAGES)
            ],
        ),
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture
def tiny_training(pages: Pages, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains a random Llama of two layers on what the demonstrator does, step by step.

    The job is the real one, but for the sampling: the demonstrator speaks, so that there is something to search.
    """
    torch = pytest.importorskip("torch")
    from trace_gym.chat import ChatEncoder
    from trace_gym.messages import Completion, Request
    from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer
    from trace_gym.training.run_config import TrainConfig
    from trace_gym.training.train import train

    shape = PolicyShape(hidden=16, layers=2, heads=2, mlp=32, vocabulary=400, context=256)
    tokenizer = build_tokenizer(["What is on Page 0?", "<search> Page 1 </search>", "<answer> word2 </answer>"], shape)
    build_model(tokenizer, shape, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    class Speaker:
        batched = True

        def __init__(self, *_: Any, say: Callable[[Request], str], **__: Any) -> None:
            self.encoder, self.say = ChatEncoder(tokenizer), say

        async def complete(self, requests: list[Request]) -> list[Completion]:
            return [self.answer(self.say(request)) for request in requests]

        def answer(self, text: str) -> Completion:
            ids = (*self.encoder.encode(text), self.encoder.eos_id)
            return Completion(text, ids, (-1.0,) * len(ids), "stop", len(ids))

    def run(
        engine: dict[str, Any],
        *,
        steps: int,
        say: Callable[[Request], str] = lambda request: request.hint or "",
        progress: Callable[[str], None] = lambda line: None,
        **trainer: Any,
    ) -> Path:
        threads = torch.get_num_threads()
        config = TrainConfig(
            out=str(tmp_path / "run"),
            env="trace_gym/HotpotQASearch-v0",
            env_kwargs={
                "data": str(pages.questions),
                "tool_format": "react",
                "prompt": "{question}",
                "demonstrator_skill": 0.7,
                **engine,
            },
            model=str(tmp_path / "model"),
            methods=("trace",),
            token_budget=10**9,
            candidates=4,
            root_budget=16,
            expansions=1,
            updates_per_step=1,
            eval_tasks=2,
            eval_every=10**6,
            save_every=10**6,
            pages_every=0,
            report_to=("none",),
            threads=1,
            trainer={"max_steps": steps, **trainer},
        )
        try:
            return train(config, lambda *args, **options: Speaker(say=say), progress=progress)
        finally:
            torch.set_num_threads(threads)

    return run
