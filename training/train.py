"""The main job: a policy, one training run per method at equal token budgets, and a comparison.

Everything goes to one folder that a person can read and an interrupted run resumes from:

    config.json            what was asked for
    before.json, .jsonl    held-out accuracy of the policy before training, and its episodes
    METHOD/metrics.jsonl   one line per step
    METHOD/trees.jsonl     every rollout tree
    METHOD/pages/          trees of some steps, to look at
    METHOD/checkpoint-N/   the newest checkpoints
    METHOD/model/          the trained policy; a LoRA adapter as an adapter
    METHOD/best/           the policy when it was best on held-out tasks, in the same form, once that was measured
    METHOD/result.json     held-out accuracy after training, and what it cost; after.jsonl: the episodes
    METHOD/runs/           TensorBoard; other places for metrics on request
    curves.png, tree.html, summary.md

Agents come in by argument (`agent_factory`): this room knows none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from trace_gym.budget import Cost, nominal_cost
from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, require, unknown_name
from trace_gym.evaluate import Report, evaluate
from trace_gym.messages import Agent
from trace_gym.mixture import source_of
from trace_gym.processes import ALONE, Processes
from trace_gym.record import read_trees, write_trees
from trace_gym.task_list import open_tasks
from trace_gym.training.report import (
    MethodSummary,
    Outcome,
    accuracy,
    comparison_table,
    eval_metrics,
    plot_curves,
    read_jsonl,
)
from trace_gym.training.run_config import MIXTURE, TrainConfig, recipe
from trace_gym.training.terminal import Status
from trace_gym.training.warm_start import WarmStart, quiet, warm_start
from trace_gym.viewer import most_telling, write_html

AgentFactory = Callable[..., Agent]
Progress = Callable[[str], None]
Watch = Callable[[Status], None]

MEASURED_TASKS = 150  # to tell whether the warm start is good enough


def train(
    config: TrainConfig,
    agent_factory: AgentFactory,
    *,
    resume: bool = False,
    progress: Progress = print,
    watch: Watch | None = None,
) -> Path:
    """Run the main job.

    Args:
        config: What to do.
        agent_factory: Makes the agent that samples, see `trace_gym.training.trainer.TraceGRPOTrainer`.
        resume: Go on with an interrupted run in ``config.out``.
        progress: Called with one line at a time.
        watch: Called with the state of a run after every batch of trees, in place of a line.

    Returns:
        The run's folder.

    Raises:
        BadInputError: If the folder is in use, or the configuration does not fit the environment.
    """
    folder = Path(config.out)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch = require("torch", "train")
    if config.threads:
        torch.set_num_threads(config.threads)
    quiet()
    from trace_gym.training.processes import launched, not_launched

    job = _Job(config, folder, agent_factory, progress, watch)
    with not_launched() as rank:
        if rank == 0:
            if not resume and folder.exists() and any(folder.iterdir()):
                raise BadInputError(
                    f"{folder} is not empty. Resume it with --resume {folder}, or choose another --out."
                )
            folder.mkdir(parents=True, exist_ok=True)
            _check(config, folder)
            _write_json(folder / "config.json", asdict(config))
            job.make_policy()
    trainer_args(config, config.methods[0], folder)  # joins the processes on the right device
    job.join(launched())
    for method in config.methods:
        job.run(method)
    return job.report()


class _Job:
    """The parts of the main job, each of which is skipped if an earlier run has done it."""

    def __init__(
        self, config: TrainConfig, folder: Path, agent_factory: AgentFactory, progress: Progress, watch: Watch | None
    ) -> None:
        self.config = config
        self.folder = folder
        self.agent_factory = agent_factory
        self.progress = progress
        self.watch = watch
        self.env_kwargs = config.env_kwargs or {}
        self.policy = config.model or ""
        self.processes: Processes = ALONE

    def make_policy(self) -> None:
        """Make the policy that training starts from, unless there is one."""
        config, needs = self.config, recipe(self.config.env)
        self.policy = config.model or str(
            warm_start(
                WarmStart(
                    env_id=config.env,
                    env_kwargs={**self.env_kwargs, **needs.warm_kwargs},
                    shape=needs.shape,
                    copying=needs.copying,
                    batch_size=needs.batch_size,
                    learning_rate=needs.learning_rate,
                    episodes=config.demonstrations,
                    skill=config.skill,
                    epochs=config.warm_epochs,
                    seed=config.seed,
                ),
                self.measure,
                progress=self.progress,
            )
        )

    def measure(self, model: Any, tokenizer: Any) -> float:
        """Return the share of training tasks that a policy solves before there is a trainer."""
        agent = self.agent_factory(
            model, tokenizer, temperature=self.config.temperature, max_tokens=self.config.max_turn_tokens
        )
        encoder, positions = ChatEncoder(tokenizer), model.config.max_position_embeddings
        return self.evaluate(agent, encoder, positions, MEASURED_TASKS, split="train").pass_at_1

    def join(self, processes: Processes) -> None:
        """Go on together with others, of whom the first writes and speaks."""
        self.processes = processes
        self.policy = processes.gather(self.policy)[0]
        if not self.is_first:
            self.progress, self.watch = lambda line: None, None

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.processes.rank == 0

    def load(self) -> tuple[Any, Any]:
        """Return the policy and its tokenizer.

        Weights that are trained are float32, whatever they are saved as: small updates would be lost in less. Those
        under an adapter stay as they are on a GPU; a CPU computes in float32.
        """
        torch, transformers = require("torch", "train"), require("transformers", "train")
        is_frozen = self.config.lora_rank and torch.accelerator.is_available()
        model = transformers.AutoModelForCausalLM.from_pretrained(self.policy, dtype="auto" if is_frozen else "float32")
        return model, transformers.AutoTokenizer.from_pretrained(self.policy)

    def make_env(self, split: str = "eval") -> gymnasium.Env[Any, Any]:
        kwargs = {**self.env_kwargs, "split": split}
        return gymnasium.make(self.config.env, disable_env_checker=True, **kwargs)

    def task_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split's tasks."""
        with closing(self.make_env(split)) as env:
            ids: Sequence[str] = env.unwrapped.task_ids  # type: ignore[attr-defined]
            return ids

    def tasks(self) -> Sequence[str] | None:
        """Return the tasks to train on: those asked for, else all that no demonstration showed.

        None means all of the environment: of a mixture, where weights count, or if those are too few for a step.
        """
        if self.config.tasks is not None:
            return open_tasks(self.config.tasks)
        if self.config.env == MIXTURE:
            return None
        ids = self.task_ids("train")
        fresh = ids if self.config.model else ids[self.config.demonstrations :]
        return fresh if len(fresh) >= self.config.candidates else None

    def evaluate(
        self,
        agent: Agent,
        encoder: ChatEncoder,
        max_context: int | None,
        num_tasks: int,
        out: Path | None = None,
        split: str = "eval",
    ) -> Report:
        """Evaluate on the first tasks of a split; equal numbers of tasks are equal tasks and seeds."""
        return evaluate(
            partial(self.make_env, split),
            agent,
            self.task_ids(split)[:num_tasks],
            encoder=encoder,
            seed=self.config.seed + 1,
            max_tokens=self.config.max_turn_tokens,
            max_context=max_context,
            out=out,
            chunk=256,
            processes=self.processes,
            group=source_of if self.config.env == MIXTURE else None,
        )

    def before(self, evaluate_now: Callable[[int, Path], Report]) -> None:
        """Evaluate the policy that training starts from, unless that was done."""
        path = self.folder / "before.json"
        if self.processes.gather(path.exists())[0]:
            return
        report = evaluate_now(self.config.eval_tasks, self.folder / "before.jsonl")
        if self.is_first:
            _write_json(path, report.to_dict())
        self.progress(f"before training: {_percent(report)} of {report.num_tasks} held-out tasks solved")

    def run(self, method: str) -> None:
        """Train with one method, unless its result is there already."""
        from trace_gym.training.checkpoint import newest_checkpoint, step_of
        from trace_gym.training.held_out import HeldOut
        from trace_gym.training.run_log import RunLog
        from trace_gym.training.trainer import TraceGRPOTrainer

        config, folder = self.config, self.folder / method
        if self.processes.gather((folder / "result.json").exists())[0]:
            self.progress(f"{method}: done before")
            return
        folder.mkdir(exist_ok=True)
        model, tokenizer = self.load()
        args = trainer_args(config, method, folder)
        trainer = TraceGRPOTrainer(
            model,
            args,
            agent_factory=self.agent_factory,
            processing_class=tokenizer,
            train_dataset=self.tasks(),
            peft_config=_lora(config.lora_rank),
        )
        trainer.remove_callback(require("transformers", "train").PrinterCallback)

        def evaluate_now(num_tasks: int = config.curve_tasks, out: Path | None = None) -> Report:
            with trainer.sampler() as agent:
                return self.evaluate(agent, trainer.encoder, trainer.max_context, num_tasks, out)

        self.before(evaluate_now)
        held_out = HeldOut(
            trainer,
            evaluate_now,
            every=config.eval_every,
            patience=config.patience,
            best=folder / "best",
            progress=self.progress,
            name=method,
        )
        log = RunLog(
            folder / "metrics.jsonl",
            method,
            config.token_budget,
            progress=self.progress,
            watch=self.watch,
            latest=lambda: trainer.last_collection.trees if trainer.last_collection else (),
            pages=folder / "pages",
            pages_every=config.pages_every,
        )
        trainer.add_callback(held_out)
        trainer.add_callback(log)
        checkpoint = self.processes.gather(newest_checkpoint(folder))[0]
        if self.is_first:
            log.rewind(step_of(checkpoint))
            _drop_later_trees(folder / "trees.jsonl", checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(str(folder / "model"))
        report = evaluate_now(config.eval_tasks, folder / "after.jsonl")
        self.progress(f"{method}: {_percent(report)} of {report.num_tasks} held-out tasks solved after training")
        if self.is_first:
            tokenizer.save_pretrained(folder / "model")
            _write_json(folder / "result.json", {"after": report.to_dict(), **log.totals()})

    def report(self) -> Path:
        """Write curves, the most telling tree and the comparison; return the run's folder."""
        if not self.is_first:
            return self.folder
        before = Report.from_dict(json.loads((self.folder / "before.json").read_text()))
        rows, runs = [], {}
        for method in self.config.methods:
            result = json.loads((self.folder / method / "result.json").read_text())
            after = Report.from_dict(result["after"])
            sources = {
                name: _outcome(before.groups[name], after.groups[name], reached)
                for name, reached in result["sources"].items()
                if name in before.groups and name in after.groups
            }
            rows.append(MethodSummary(method, _outcome(before, after, result), Cost(**result["cost"]), sources))
            start = {"step": 0, "budget/tokens_total": 0, **eval_metrics(before)}
            end = {"budget/tokens_total": result["cost"]["tokens"], **eval_metrics(after)}
            runs[method] = [start, *read_jsonl(self.folder / method / "metrics.jsonl"), end]
        plot_curves(runs, self.folder / "curves.png")
        table = comparison_table(rows)
        (self.folder / "summary.md").write_text(table)
        trees = read_trees(self.folder / self.config.methods[0] / "trees.jsonl")
        write_html([most_telling(trees)], self.folder / "tree.html", title=f"{self.config.env}: most telling tree")
        self.progress(f"\n{table}\nEverything is in {self.folder}: curves.png, tree.html, summary.md, METHOD/…")
        return self.folder


def trainer_args(config: TrainConfig, method: str, folder: Path) -> Any:
    """Return the trainer's configuration; methods differ in who gets rollouts, at equal nominal cost."""
    from trace_gym.training.config import TraceGRPOConfig

    flat = method == "uniform"
    nominal = int(nominal_cost(config.root_budget, config.expansions))
    for name in config.trainer:
        if name not in TraceGRPOConfig.__dataclass_fields__:
            raise unknown_name("option of TraceGRPOConfig", name, TraceGRPOConfig.__dataclass_fields__)
    options: dict[str, Any] = dict(
        output_dir=str(folder),
        env_id=config.env,
        env_kwargs={"split": "train", **(config.env_kwargs or {})},
        candidates=config.candidates,
        root_budget=nominal if flat else config.root_budget,
        expansions=0 if flat else config.expansions,
        allocator=method,
        predictor=config.predictor,
        advantage="grpo" if flat else config.advantage,
        updates_per_step=config.updates_per_step,
        max_turn_tokens=config.max_turn_tokens,
        token_budget=config.token_budget,
        temperature=config.temperature,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=0.1,  # of the tokens; without it Adam's first steps undo a part of what the policy knows
        adam_beta2=0.95,  # a run has tens of steps, not thousands
        per_device_train_batch_size=config.batch_size,
        save_steps=config.save_every,
        save_total_limit=2,
        trees_path=str(folder / "trees.jsonl"),
        trees_every=config.trees_every,
        report_to=list(config.report_to) or None,
        project="trace_gym",
        run_name=f"{folder.parent.name}-{method}",
        disable_tqdm=True,
        seed=config.seed,
    )
    return TraceGRPOConfig(**{**options, **config.trainer})


def _check(config: TrainConfig, folder: Path) -> None:
    """Refuse what the trainer or the environment would refuse, before anything heavy starts."""
    from trace_gym.training.tasks import training_tasks

    tasks = None if config.tasks is None else open_tasks(config.tasks)
    for method in config.methods:
        training_tasks(trainer_args(config, method, folder / method), tasks)


def _outcome(before: Report, after: Report, reached: Mapping[str, Any]) -> Outcome:
    numbers = {name: reached[name] for name in ("effective_selected", "effective_candidates", "reward")}
    return Outcome(accuracy(before), accuracy(after), **numbers)


def _lora(rank: int) -> Any:
    if not rank:
        return None
    return require("peft", "train").LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _drop_later_trees(path: Path, checkpoint: Path | None) -> None:
    """Forget the trees of steps after the checkpoint: they are played again."""
    if not path.exists():
        return
    from trace_gym.training.checkpoint import read_state

    steps = read_state(checkpoint)["num_collections"] if checkpoint else 0
    kept = [tree for tree in read_trees(path) if tree.step < steps]
    part = path.with_suffix(".part")
    write_trees(part, kept, append=False)
    part.replace(path)  # in one piece: an interrupt loses no tree


def _percent(report: Report) -> str:
    low, high = report.interval
    return f"{report.pass_at_1:.1%} [{low:.1%}, {high:.1%}]"


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
