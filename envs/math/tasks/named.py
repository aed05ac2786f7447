"""Data sets by name, suites of them, and what ``data`` may be.

The revision of each set is pinned, so that a benchmark stays the same benchmark. The suites are those that the TRACE
paper reports: five sets of competition mathematics (``math-id``) and three of general knowledge (``math-ood``).
DeepScaleR is cleaned as it is loaded: it holds records without an answer and questions whose answers contradict
each other. Benchmarks are loaded as they are, and a record that cannot be read is an error there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trace_gym.envs.hub import hub_rows
from trace_gym.envs.math.tasks.tables import JoinedTable, RowTable
from trace_gym.envs.math.tasks.task import TaskTable
from trace_gym.envs.record_files import Located, Rows, locate, open_rows
from trace_gym.envs.task_table import SPLITS
from trace_gym.errors import BadInputError

logger = logging.getLogger(__name__)

Source = str | Path
Data = Source | Sequence[Source] | Mapping[str, Source | Sequence[Source]]


@dataclass(frozen=True)
class NamedSet:
    """Where a data set is found.

    Attributes:
        hub_id: Its id at the hub, or a folder.
        split: The part of it.
        size: Records in that part.
        revision: The commit; None for the newest.
        config: The configuration, if there are several.
        licence: As its page states it.
        clean: Whether noise is left out, see `trace_gym.envs.math.tasks.noise`.
        gated: Whether its owners ask for an account and consent.
    """

    hub_id: str
    split: str
    size: int
    revision: str | None = None
    config: str | None = None
    licence: str = "not stated"
    clean: bool = False
    gated: bool = False


_GSM8K = "740312add88f781978c0658806c59bc2815b9866"

NAMED: dict[str, NamedSet] = {
    "deepscaler": NamedSet(
        "agentica-org/DeepScaleR-Preview-Dataset",
        "train",
        40_315,
        "b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29",
        licence="MIT",
        clean=True,
    ),
    "gsm8k-train": NamedSet("openai/gsm8k", "train", 7_473, _GSM8K, "main", licence="MIT"),
    "gsm8k": NamedSet("openai/gsm8k", "test", 1_319, _GSM8K, "main", licence="MIT"),
    "math-500": NamedSet("HuggingFaceH4/MATH-500", "test", 500, "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
    "aime24": NamedSet("HuggingFaceH4/aime_2024", "train", 30, "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
    "aime25": NamedSet("math-ai/aime25", "test", 30, "563bb8404243c5f09de6ec262f2db674fe5bce9b", licence="Apache-2.0"),
    "amc23": NamedSet("math-ai/amc23", "test", 40, "80815d37005feb82cd7f8fbc6901d5d3eff43057"),
    "minerva": NamedSet("math-ai/minervamath", "test", 272, "ee46ddc498933b1977577953250ca5c66be64f96"),
    "olympiadbench": NamedSet("math-ai/olympiadbench", "test", 674, "4faaf1e6ec17d11a4218a9bf4c049ecaf954dd84"),
    "mmlu-pro": NamedSet(
        "TIGER-Lab/MMLU-Pro", "test", 12_032, "b189ec765aa7ed75c8acfea42df31fdae71f97be", licence="MIT"
    ),
    "arc-c": NamedSet(
        "allenai/ai2_arc",
        "test",
        1_172,
        "210d026faf9955653af8916fad021475a3f00453",
        "ARC-Challenge",
        licence="CC-BY-SA-4.0",
    ),
    "gpqa-diamond": NamedSet(
        "Idavidrein/gpqa",
        "train",
        198,
        "633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        "gpqa_diamond",
        licence="CC-BY-4.0",
        gated=True,
    ),
}

SUITES: dict[str, tuple[str, ...]] = {
    "math-id": ("aime24", "amc23", "math-500", "minerva", "olympiadbench"),
    "math-ood": ("mmlu-pro", "arc-c", "gpqa-diamond"),
}


def load_data(data: Data, split: str | None = None) -> TaskTable:
    """Load the tasks that ``data`` names.

    Args:
        data: A name from `NAMED` or `SUITES`, a local file, ``"NAME=PATH"`` (a local file under a name; a name from
            `NAMED` treats it as that set), or a sequence of these. A mapping ``{"train": …, "eval": …}`` gives each
            split data of its own.
        split: ``"train"`` or ``"eval"``: one question in five is held out for the latter, by a digest of its text;
            None for all.

    Raises:
        BadInputError: If there is no such set or file, or a record cannot be read.
        InfrastructureError: If the hub cannot be reached.
        MissingExtraError: If a library is needed that is not installed.
    """
    if isinstance(data, Mapping):
        if set(data) != set(SPLITS):
            raise BadInputError(f"As a mapping, data needs the keys 'train' and 'eval'; got {sorted(map(str, data))}.")
        data, split = data[split or "train"], None
    given = [data] if isinstance(data, str | Path) else list(data)
    if not given or not all(isinstance(source, str | Path) for source in given):
        raise BadInputError(f"data must be a name, a file or a sequence of them; got {data!r}.")
    sources = [name for source in given for name in SUITES.get(str(source), (str(source),))]
    return _load(tuple(locate(source, NAMED, SUITES) for source in sources), split)


@lru_cache(maxsize=8)  # the environments of a run share one table; it never changes
def _load(sources: tuple[Located, ...], split: str | None) -> TaskTable:
    tables = []
    for source in sources:
        spec = NAMED.get(source.name)
        if source.path is not None:
            rows = open_rows(source.path)
        else:
            rows = _hub_rows(source.name, NAMED[source.name])
        table = RowTable(source.name, rows, split, clean=spec is not None and spec.clean)
        if table.noise is not None:
            logger.warning("%s: %s", source.name, table.noise)
        tables.append(table)
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def _hub_rows(name: str, spec: NamedSet) -> Rows:
    consent = "It is gated: accept its terms on its page and log in with 'hf auth login'." if spec.gated else ""
    return hub_rows(
        name, spec.hub_id, spec.split, extra="math", config=spec.config, revision=spec.revision, note=consent
    )


def list_sets() -> str:
    """Return the table of the named sets, one to a line."""
    lines = [("NAME", "TASKS", "SUITE", "LICENCE", "HUB")]
    for name, spec in NAMED.items():
        suite = next((suite for suite, names in SUITES.items() if name in names), "")
        place = f"{spec.hub_id} ({', '.join(part for part in (spec.config, spec.split) if part)})"
        lines.append((name, f"{spec.size:,}", suite, spec.licence, place + (", gated" if spec.gated else "")))
    return "\n".join(f"{a:14}{b:>7}  {c:9} {d:13} {e}" for a, b, c, d, e in lines)


def show_tasks(table: TaskTable, count: int) -> str:
    """Return the first tasks of a table as a person reads them."""
    shown = [f"{len(table):,} tasks"]
    for task in map(table.get, table[:count]):
        facts = [f"difficulty {task.difficulty}" if task.difficulty else "", task.subject]
        head = ", ".join([task.task_id, *filter(None, facts)])
        shown.append(f"--- {head}\n{task.prompt}\n=> {task.answer}")
    return "\n\n".join(shown)
