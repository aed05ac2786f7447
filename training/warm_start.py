"""The default policy's start: supervised training on scripted demonstrations of mixed quality.

The demonstrations are played in the real environment with ``demonstrator_skill``: at a skill of 0.6 four steps in ten
go wrong, so the trained policy solves a middling share of the tasks and leaves something to learn. Equal inputs give
equal weights on one machine; the result is kept in a cache folder named by a hash of everything that went into it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from trace_gym.cache import cache_folder
from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, InfrastructureError, require
from trace_gym.messages import Message
from trace_gym.training.policy import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    PolicyShape,
    build_model,
    build_tokenizer,
    signatures,
)

SAVED = "model.safetensors"
KEY_SAMPLE = 300  # tasks
PART = 8  # demonstrations that pass through the model together
MEASURE_BELOW = 0.4  # loss; a policy with more solves nothing, which takes long to find out

Measure = Callable[[Any, Any], float]


@dataclass(frozen=True)
class WarmStart:
    """How the default policy is made.

    Attributes:
        env_id: The environment; it must offer demonstrations.
        env_kwargs: Its arguments.
        shape: Size of the model.
        episodes: Demonstrations to play, each on another task as far as there are enough.
        skill: Share of the demonstrator's steps that are right.
        epochs: Most passes over the demonstrations.
        target: Share of tasks solved at which training stops, if it is measured.
        batch_size: Demonstrations per update.
        learning_rate: Peak learning rate; falls to zero linearly.
        seed: Seed of the weights, the demonstrations and their order.
        copying: Whether names have to be copied that are seen for the first time: then no token spans two words, and
            the fresh model has induction heads, see `trace_gym.training.policy.add_induction_heads`.
    """

    env_id: str = "trace_gym/MathCode-v0"
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    shape: PolicyShape = field(default_factory=PolicyShape)
    episodes: int = 6_000
    skill: float = 0.6
    epochs: float = 4.5
    target: float = 0.5
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0
    copying: bool = False

    def key(self) -> str:
        """Return the hash of everything that makes the policy: this, the libraries, the template, the tasks.

        Of the tasks a sample goes in, with its prompts and first demonstrated actions: what a change of the
        environment's texts would change.
        """
        names = ("torch", "transformers", "trl", "tokenizers")
        content: list[Any] = [asdict(self), {name: require(name, "train").__version__ for name in names}]
        content += [CHAT_TEMPLATE, SPECIAL_TOKENS, PART]
        with closing(self.make_env()) as env:
            ids = env.unwrapped.task_ids  # type: ignore[attr-defined]
            for task_id in ids[:: max(1, len(ids) // KEY_SAMPLE)]:
                _, info = env.reset(seed=self.seed, options={"task_id": task_id})
                content.append([info["messages"], info["tools"], info.get("demonstration")])
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def make_env(self) -> gymnasium.Env[Any, Any]:
        """Return an environment with the demonstrator."""
        return gymnasium.make(self.env_id, **{**self.env_kwargs, "demonstrator_skill": self.skill})


@dataclass(frozen=True)
class Demonstration:
    """One played demonstration.

    Attributes:
        messages: The conversation.
        tools: The tools on offer.
        reward: Its outcome.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    reward: float


def quiet() -> None:
    """Turn off the progress bars and notices of the model libraries; progress is told by our own lines."""
    transformers = require("transformers", "train")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    require("datasets", "train").disable_progress_bars()


def warm_start(
    config: WarmStart,
    measure: Measure | None = None,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = print,
) -> Path:
    """Return the folder of the warm-started policy; make it unless the cache has it.

    Args:
        config: How it is made.
        measure: Returns the share of tasks that a model with its tokenizer solves. Training stops once it reaches
            ``config.target``: how fast a fresh model learns to copy numbers differs a lot from seed to seed.
        cache: Folder of the policies; `trace_gym.cache.cache_folder` by default.
        progress: Called with one line at a time.

    Raises:
        MissingExtraError: If the training extra is not installed.
        BadInputError: If the environment offers no demonstrations.
    """
    target = (cache or cache_folder()) / f"policy-{config.key()}"
    if (target / SAVED).exists():
        progress(f"warm start: using {target}")
        return target
    demonstrations = play_demonstrations(config, progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Trained elsewhere and moved in one piece: an interrupted run leaves no half policy behind.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch) / "policy"
        _train(config, demonstrations, folder, measure, progress)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


def play_demonstrations(config: WarmStart, progress: Callable[[str], None] = print) -> list[Demonstration]:
    """Play the scripted demonstrator; equal configurations give equal demonstrations.

    Raises:
        BadInputError: If the environment offers no demonstrations.
        InfrastructureError: If an episode failed for that reason.
    """
    workers = 2 * (os.cpu_count() or 1)
    shares = np.array_split(np.arange(config.episodes), workers)
    order = np.random.default_rng([config.seed, 0]).permutation(config.episodes)

    def play(share: Sequence[int]) -> list[Demonstration]:
        with closing(config.make_env()) as env:
            ids = env.unwrapped.task_ids  # type: ignore[attr-defined]
            return [_play(env, ids[int(order[i]) % len(ids)], seed=config.seed + int(i)) for i in share]

    with ThreadPoolExecutor(workers) as pool:
        found = [demonstration for part in pool.map(play, shares) for demonstration in part]
    solved = float(np.mean([demonstration.reward for demonstration in found]))
    progress(f"warm start: {len(found)} demonstrations played, {solved:.0%} of them right")
    return found


def _play(env: gymnasium.Env[Any, Any], task_id: str, seed: int) -> Demonstration:
    """Play one demonstration; an infrastructure failure is tried again once."""
    try:
        return _play_once(env, task_id, seed)
    except InfrastructureError:
        return _play_once(env, task_id, seed)


def _play_once(env: gymnasium.Env[Any, Any], task_id: str, seed: int) -> Demonstration:
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    reward, over = 0.0, False
    while not over:
        if "demonstration" not in info:
            raise BadInputError(f"{env.spec and env.spec.id} offers no demonstrations to start from.")
        _, reward, terminated, truncated, info = env.step(info["demonstration"])
        over = terminated or truncated
    if "failure" in info:
        raise InfrastructureError(info["failure"]["kind"], info["failure"]["reason"])
    messages = tuple(Message.from_dict(message) for message in info["messages"])
    return Demonstration(messages, tuple(info["tools"]), float(reward))


def encode_demonstration(encoder: ChatEncoder, demonstration: Demonstration) -> dict[str, list[int]]:
    """Return a conversation as a rollout would have it: ids, and 1 where the assistant wrote the token."""
    messages = demonstration.messages
    start = next(i for i, message in enumerate(messages) if message.role == "assistant")
    ids = list(encoder.prompt(messages[:start], demonstration.tools))
    mask = [0] * len(ids)
    while start < len(messages):
        answer = [*encoder.encode(messages[start].content), encoder.eos_id]
        following = start + 1
        while following < len(messages) and messages[following].role != "assistant":
            following += 1
        observation = messages[start + 1 : following]
        added = encoder.observation(observation, closed=True) if following < len(messages) else ()
        ids += [*answer, *added]
        mask += [1] * len(answer) + [0] * len(added)
        start = following
    return {"input_ids": ids, "assistant_masks": mask}


def _train(
    config: WarmStart,
    demonstrations: Sequence[Demonstration],
    folder: Path,
    measure: Measure | None,
    progress: Callable[[str], None],
) -> None:
    """Train a fresh policy on the demonstrations with TRL's SFTTrainer and save it.

    A batch is of any lengths, and passes through the model in parts of like lengths, which halves the padding. Batches
    of like lengths would save the rest, but made the loss fall several times more slowly.
    """
    datasets, trl = require("datasets", "train"), require("trl", "train")
    texts = [message.content for demonstration in demonstrations for message in demonstration.messages]
    texts += [signatures(demonstration.tools) for demonstration in demonstrations]
    tokenizer = build_tokenizer(texts, config.shape, config.copying)
    encoder = ChatEncoder(tokenizer)
    rows = [encode_demonstration(encoder, demonstration) for demonstration in demonstrations]
    rows = [row for row in rows if len(row["input_ids"]) <= config.shape.context]
    model = build_model(tokenizer, config.shape, config.seed, config.copying)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    progress(f"warm start: training {millions:.2f} M parameters on {len(rows)} conversations")
    args = trl.SFTConfig(
        output_dir=str(folder / "unused"),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=PART,
        gradient_accumulation_steps=max(1, config.batch_size // PART),
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=50,
        weight_decay=0.01,
        adam_beta2=0.98,
        max_length=config.shape.context,
        seed=config.seed,
        bf16=False,
        activation_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=50,
        disable_tqdm=True,
    )
    trainer = _sft_trainer(config.batch_size)(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[_callback(config, tokenizer, measure, progress)],
    )
    trainer.remove_callback(require("transformers", "train").PrinterCallback)
    trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sft_trainer(batch_size: int) -> Any:
    trl, torch = require("trl", "train"), require("torch", "train")

    class PartsOfLikeLengths(torch.utils.data.Sampler):  # type: ignore[misc,name-defined]
        """Yields the rows in random order, each batch of them sorted by length."""

        def __init__(self, lengths: Sequence[int], seed: int) -> None:
            self.lengths, self.rng = np.asarray(lengths), np.random.default_rng([seed, 1])

        def __len__(self) -> int:
            return len(self.lengths)

        def __iter__(self) -> Iterator[int]:
            order = self.rng.permutation(len(self.lengths))
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                yield from batch[np.argsort(self.lengths[batch], kind="stable")].tolist()

    class Trainer(trl.SFTTrainer):  # type: ignore[misc,name-defined]
        """Its batches pass in parts of like lengths."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return PartsOfLikeLengths([len(ids) for ids in self.train_dataset["input_ids"]], self.args.seed)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            """Return TRL's loss; logits are of the tokens to learn alone, which takes a third of the time."""
            labels = inputs["labels"][:, 1:]
            learned = labels != -100
            states = model.model(input_ids=inputs["input_ids"]).last_hidden_state  # padded at the end: needs no mask
            logits = model.lm_head(states[:, :-1][learned])
            return torch.nn.functional.cross_entropy(logits, labels[learned], reduction="sum") / num_items_in_batch

    return Trainer


def _callback(config: WarmStart, tokenizer: Any, measure: Measure | None, progress: Callable[[str], None]) -> Any:
    transformers = require("transformers", "train")

    class Progress(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        """Tells how far training is, and stops it once the policy is good enough."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not logs or "loss" not in logs:
                return
            loss, solved = float(logs["loss"]), None
            if measure is not None and loss < MEASURE_BELOW:
                solved = measure(kwargs["model"], tokenizer)
                control.should_training_stop = solved >= config.target
            told = "" if solved is None else f", {solved:.0%} of the training tasks solved"
            progress(f"warm start: step {state.global_step}, loss {loss:.3f}{told}")

    return Progress()
