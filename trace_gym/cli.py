"""The command line: ``trace-gym train | merge | eval | view | data | serve | check``.

The only file of the hub that names the rooms, inside the command functions, so that ``trace-gym --help`` is quick and
a missing extra is one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_type_hints

import gymnasium

import trace_gym
from trace_gym.errors import BadInputError, TraceGymError, unknown_name
from trace_gym.snapshot import Snapshotable


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 refused or failed, 130 interrupted."""
    # Before torch loads: its idle threads spin, which beside any other busy process makes it many times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    parser = argparse.ArgumentParser(prog="trace-gym", description=(trace_gym.__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action="version", version=trace_gym.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_train, _add_merge, _add_eval, _add_view, _add_data, _add_serve, _add_check):
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except TraceGymError as error:
        print(f"trace-gym: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntrace-gym: interrupted", file=sys.stderr)
        return 130


# train

QUICK = {
    "token_budget": 30_000,
    "candidates": 24,
    "root_budget": 48,
    "eval_tasks": 150,
    "eval_every": 8,
    "curve_tasks": 75,
    "demonstrations": 3_000,
    "warm_epochs": 4.0,
}
QUICK_ENV = {"difficulties": [1], "families": ["arithmetic", "power", "bases", "counting"], "max_turns": 4}


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a policy with TRACE and compare it with flat GRPO",
        description="Warm start, training by each method at equal token budgets, and a comparison, all in one folder.",
    )
    parser.add_argument(
        "--resume", metavar="FOLDER", help="go on with an interrupted run; takes its options from there"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="options from a TOML or JSON file; those given here win"
    )
    parser.add_argument("--quick", action="store_true", help="the short form of the default run, about three minutes")
    from trace_gym.training.run_config import TrainConfig

    _add_fields(parser, TrainConfig)
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from trace_gym.agents import make_agent
    from trace_gym.training.run_config import TrainConfig
    from trace_gym.training.terminal import TerminalView, can_draw
    from trace_gym.training.train import train

    def agent_factory(model: Any, tokenizer: Any, *, name: str = "transformers", **options: Any) -> Any:
        return make_agent(name, model=model, tokenizer=tokenizer, **options)

    if arguments.resume:
        config = TrainConfig.load(arguments.resume)
    else:
        given = {
            **(TrainConfig.read(arguments.config) if arguments.config else {}),
            **_given_fields(arguments, TrainConfig),
        }
        if arguments.quick:
            quick_env = {"env_kwargs": QUICK_ENV} if given.get("env", TrainConfig.env) == TrainConfig.env else {}
            given = {**QUICK, **quick_env, **given}
        config = TrainConfig.make(given)
    try:
        with ExitStack() as stack:
            view = stack.enter_context(TerminalView()) if can_draw() else None
            train(
                config,
                agent_factory,
                resume=bool(arguments.resume),
                progress=view.say if view else _say,
                watch=view.show if view else None,
            )
    except KeyboardInterrupt:
        print(f"\ntrace-gym: interrupted. Go on with: trace-gym train --resume {config.out}", file=sys.stderr)
        return 130
    return 0


# merge


def _add_merge(commands: Any) -> None:
    parser = commands.add_parser("merge", help="merge a LoRA adapter into its base model")
    parser.add_argument(
        "source", metavar="RUN_OR_ADAPTER", help="folder of a run, of one of its methods, or an adapter"
    )
    parser.add_argument("out", metavar="OUT", help="folder of the merged model; must be new or empty")
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from trace_gym.training.merge import merge_adapter

    print(f"{merge_adapter(arguments.source, arguments.out)} and its base model: {arguments.out}")
    return 0


# eval


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure an agent on an environment")
    parser.add_argument("--agent", required=True, help="scripted, transformers, vllm, vllm_server or openai")
    parser.add_argument("--model", help="model name or folder, or name at the endpoint (openai)")
    parser.add_argument(
        "--base-url", help="endpoint; default: the SDK's own (openai), or http://localhost:8000 (vllm_server)"
    )
    parser.add_argument("--env", default="trace_gym/MathCode-v0", help="id of the environment (default: %(default)s)")
    parser.add_argument(
        "--env-kwargs", type=_json_object, default={}, metavar="JSON", help='such as \'{"split": "eval"}\''
    )
    parser.add_argument("--tasks", type=int, default=100, help="tasks to play, the first ones (default: %(default)s)")
    parser.add_argument("--n", type=int, default=1, help="episodes per task (default: %(default)s)")
    parser.add_argument("--skill", type=float, default=1.0, help="skill of the scripted agent (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer of a turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of worlds and sampling (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSONL file with one line per episode; an existing one is resumed")
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from trace_gym.agents import AGENTS, make_agent
    from trace_gym.evaluate import evaluate

    if arguments.agent not in AGENTS:
        raise unknown_name("agent", arguments.agent, AGENTS)
    kwargs = dict(arguments.env_kwargs)
    options: dict[str, Any] = {}
    if arguments.agent == "scripted":
        kwargs["demonstrator_skill"] = arguments.skill
    elif not arguments.model:
        raise BadInputError(f"--agent {arguments.agent} needs --model.")
    else:
        options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    if arguments.agent in ("transformers", "vllm", "vllm_server"):
        options["name_or_path"] = arguments.model
    elif arguments.agent == "openai":
        options |= {"model": arguments.model, "base_url": arguments.base_url}
    if arguments.agent == "vllm_server" and arguments.base_url:
        options["base_url"] = arguments.base_url

    make_env = _env_maker(arguments.env, kwargs)
    env = make_env()
    ids = list(env.unwrapped.task_ids)[: arguments.tasks]  # type: ignore[attr-defined]
    env.close()
    agent = make_agent(arguments.agent, **options)
    report = evaluate(
        make_env,
        agent,
        ids,
        arguments.n,
        encoder=getattr(agent, "encoder", None),  # of agents that own a tokenizer
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        out=arguments.out,
        run=json.dumps([arguments.env, kwargs, arguments.agent, options, arguments.seed], sort_keys=True),
        progress=lambda done, total: _say(f"{done}/{total} episodes"),
    )
    print(report)
    return 0


# view


def _add_view(commands: Any) -> None:
    parser = commands.add_parser("view", help="look at rollout trees, in the terminal or as one HTML file")
    parser.add_argument("trees", type=Path, help="a trees.jsonl")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to this file")
    parser.add_argument("--step", type=int, help="only the trees of this training step")
    parser.add_argument("--most", type=int, default=20, help="most trees on the page (default: %(default)s)")
    parser.set_defaults(run=_view)


def _view(arguments: argparse.Namespace) -> int:
    from trace_gym.record import read_trees
    from trace_gym.viewer import most_telling, print_tree, write_html

    trees = [t for t in read_trees(arguments.trees) if arguments.step in (None, t.step) and len(t) > 1]
    if not trees:
        raise BadInputError(f"{arguments.trees} has no trees" + ("" if arguments.step is None else " of that step"))
    first = most_telling(trees)
    if arguments.html is None:
        print(print_tree(first))
    else:
        others = [tree for tree in reversed(trees) if tree is not first]
        write_html([first, *others[: arguments.most - 1]], arguments.html, title=str(arguments.trees))
        print(arguments.html)
    return 0


# data


SEARCH = "trace_gym/HotpotQASearch-v0"


def _add_data(commands: Any) -> None:
    parser = commands.add_parser("data", help="list, show and compare data sets of problems")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the data sets that are known by name")
    listing.set_defaults(run=_data_list)

    what = "name of a data set or suite, a file, or NAME=PATH for a local copy"
    whose = "whose data they are; by default the names decide, and files are problems of mathematics"
    show = actions.add_parser("show", help="the first problems of a data set")
    show.add_argument("data", metavar="DATA", help=what)
    show.add_argument("--n", type=int, default=3, help="how many (default: %(default)s)")
    show.add_argument("--env", help=whose)
    show.set_defaults(run=_data_show)

    check = actions.add_parser(
        "check",
        help="find test problems that stand in the training data",
        description="Exit code 1 if test problems stand in the training data: word for word, or nearly so and with the "
        "same answer. Problems that are nearly the same and have another answer are only shown.",
    )
    check.add_argument("--train", nargs="+", required=True, metavar="DATA", help=what)
    check.add_argument("--test", nargs="+", required=True, metavar="DATA", help="the same")
    check.add_argument(
        "--threshold", type=float, default=0.6, help="share of runs of five words in common (default: %(default)s)"
    )
    check.add_argument("--show", type=int, default=10, help="overlaps shown per test set (default: %(default)s)")
    check.add_argument("--env", help=whose)
    check.set_defaults(run=_data_check)

    bfcl = actions.add_parser("bfcl", help="what the function-calling tasks come from, and how many there are")
    bfcl.set_defaults(run=_data_bfcl)

    index = actions.add_parser(
        "index",
        help="index a corpus of passages for searching",
        description="The folder holds the texts as well and is given to an environment or a server as its corpus.",
    )
    index.add_argument("corpus", metavar="CORPUS", help="JSON lines: id and contents, or id, title and text")
    index.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the index goes")
    index.add_argument(
        "--backend", default="embedded", metavar="NAME", help="embedded, pyserini or dense (default: %(default)s)"
    )
    index.add_argument(
        "--options", type=_json_object, default={}, metavar="JSON", help='of dense, such as \'{"model": "FOLDER"}\''
    )
    index.set_defaults(run=_data_index)


def _data_list(arguments: argparse.Namespace) -> int:
    from trace_gym.envs.math.tasks import named as math
    from trace_gym.envs.search.tasks import named as search

    print(f"For trace_gym/MathCode-v0:\n{math.list_sets()}\n\nFor trace_gym/HotpotQASearch-v0:\n{search.list_sets()}")
    return 0


def _data_show(arguments: argparse.Namespace) -> int:
    if arguments.n < 1:
        raise BadInputError(f"--n must be at least 1; got {arguments.n}.")
    if _is_search([arguments.data], arguments.env):
        from trace_gym.envs.search.tasks.named import load_questions, show_questions

        print(show_questions(load_questions(arguments.data), arguments.n))
    else:
        from trace_gym.envs.math.tasks.named import load_data, show_tasks

        print(show_tasks(load_data(arguments.data), arguments.n))
    return 0


def _data_check(arguments: argparse.Namespace) -> int:
    from trace_gym.envs.math.tasks.named import load_data
    from trace_gym.envs.math.tasks.overlap import find_overlaps, overlap_table
    from trace_gym.envs.math.tasks.task import Task
    from trace_gym.envs.search.tasks.named import load_questions

    def load(data: list[str]) -> Iterable[Task]:
        if not _is_search([*arguments.train, *arguments.test], arguments.env):
            return load_data(data).tasks()
        asked = load_questions(data).questions()
        return (Task(q.task_id, q.question, q.golden_answers[0], q.task_id.rpartition("-")[0], 0) for q in asked)

    tests = list(load(arguments.test))
    overlaps = find_overlaps(load(arguments.train), tests, arguments.threshold)
    print(overlap_table([task.task_id for task in tests], overlaps, arguments.show))
    return int(any(overlap.is_leak for overlap in overlaps))


def _is_search(data: Sequence[str], env: str | None) -> bool:
    """Whether data sets are questions for searching: by the environment, else by the names among them."""
    from trace_gym.envs.search.tasks.named import NAMED, SUITES

    if env is not None and env not in trace_gym.ENVS:
        raise unknown_name("environment", env, trace_gym.ENVS)
    return env == SEARCH if env else any(name.partition("=")[0] in (*NAMED, *SUITES) for name in data)


def _data_bfcl(arguments: argparse.Namespace) -> int:
    from trace_gym.envs.bfcl.summary import summary

    print(summary())
    return 0


def _data_index(arguments: argparse.Namespace) -> int:
    from trace_gym.envs.search.retrieval.backends import build
    from trace_gym.envs.search.retrieval.corpus import corpus_path

    began = time.monotonic()

    def progress(done: int) -> None:
        seconds = max(time.monotonic() - began, 1e-9)
        _say(f"{done:,} passages, {done / seconds:,.0f} per second")

    build(arguments.backend, corpus_path(arguments.corpus), arguments.out, progress, **arguments.options)
    _say(f"{arguments.out}: {time.monotonic() - began:.1f} s")
    return 0


# serve


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a part of an environment over HTTP")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    search = parts.add_parser(
        "search",
        help="a retrieval server with Search-R1's schema",
        description="POST /retrieve takes what the clients of Search-R1, SkyRL, GEM and rLLM send; GET /health answers "
        "200 once the index is loaded.",
    )
    search.add_argument("--backend", default="auto", help="embedded, pyserini, dense, hybrid (default: %(default)s)")
    search.add_argument("--corpus", help="JSON lines, or folder of an index (default: the bundled corpus)")
    search.add_argument(
        "--options", type=_json_object, default={}, metavar="JSON", help="of the backend, such as '{\"k1\": 1.2}'"
    )
    search.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    search.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    search.set_defaults(run=_serve_search)


def _serve_search(arguments: argparse.Namespace) -> int:
    from trace_gym.envs.search.retrieval.server import serve

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve(arguments.backend, arguments.corpus, arguments.options, host=arguments.host, port=arguments.port, say=_say)
    return 0


# check


def _add_check(commands: Any) -> None:
    parser = commands.add_parser("check", help="check the laws of a snapshot-able environment")
    parser.add_argument("env", help="id of the environment")
    parser.add_argument("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments of it")
    parser.add_argument("--backend", metavar="NAME", help="what runs the code, such as fork, replay or monty")
    parser.add_argument("--cycles", type=int, default=1000, help="cycles of the leak test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episode (default: %(default)s)")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    kwargs = {"demonstrator_skill": 0.7} if arguments.env in trace_gym.ENVS else {}
    if arguments.backend is not None:
        kwargs["backend"] = arguments.backend
    env = _env_maker(arguments.env, {**kwargs, **arguments.env_kwargs})()
    try:
        laws = trace_gym.check_snapshot(env, cycles=arguments.cycles, seed=arguments.seed)
    finally:
        env.close()
    print("\n".join(map(str, laws)))
    return int(any(law.holds is False for law in laws))


# Shared by the commands.


def _env_maker(env_id: str, kwargs: dict[str, Any]) -> Callable[[], gymnasium.Env[Any, Any]]:
    if env_id.rpartition(":")[2] not in gymnasium.registry and ":" not in env_id:
        raise unknown_name("environment", env_id, gymnasium.registry)
    try:
        env = gymnasium.make(env_id, **kwargs)
    except TypeError as error:
        raise BadInputError(f"{env_id} does not take the arguments {kwargs}: {error}") from error
    env.close()
    if not isinstance(env.unwrapped, Snapshotable):
        raise BadInputError(f"{env_id} is no environment of this kind; it has no get_state and set_state.")
    return lambda: gymnasium.make(env_id, **kwargs)


def _add_fields(parser: argparse.ArgumentParser, config: Any) -> None:
    """Make an option of every field of a dataclass; only what is given overrides the default."""
    hints = get_type_hints(config)
    parsers: dict[Any, Callable[[str], Any]] = {
        int: int,
        float: float,
        dict[str, Any]: _json_object,
        dict[str, Any] | None: _json_object,
        tuple[str, ...]: _names,
        tuple[float, ...]: _numbers,
    }
    shapes = {
        int: "N",
        float: "X",
        dict[str, Any]: "JSON",
        dict[str, Any] | None: "JSON",
        tuple[str, ...]: "A,B",
        tuple[float, ...]: "X,Y",
    }
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        default = field.default_factory() if callable(field.default_factory) else field.default
        shown = ",".join(default) if isinstance(default, tuple) else default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=parsers.get(kind, str),
            default=argparse.SUPPRESS,
            metavar=shapes.get(kind, "NAME"),
            help=f"{field.metadata['help']} (default: {shown})".replace("%", "%%"),
        )


def _given_fields(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in _names(text))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
