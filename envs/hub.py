"""Data sets of the hub, and what to say where there is none.

The hub's own client tries six times, with pauses of half a minute in all, and reports every try. Here one short request
finds out whether anybody answers; if not, only what an earlier load left on the disk is looked at.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trace_gym.envs.record_files import Rows, TableRows
from trace_gym.errors import InfrastructureError, require

ANSWER_S = 5.0  # how long the hub may take to answer at all

_lock = threading.Lock()  # the libraries keep one setting for all threads


def hub_rows(
    name: str,
    hub_id: str,
    split: str,
    *,
    extra: str,
    config: str | None = None,
    revision: str | None = None,
    note: str = "",
) -> Rows:
    """Load a data set from the hub, or from the copy that an earlier load left.

    Args:
        name: What the set is called here.
        hub_id: Its id at the hub, or the path of a folder of the same form.
        split: The part of it.
        extra: The extra of this package that installs `datasets`.
        config: The configuration, if there are several.
        revision: The commit; None for the newest.
        note: A sentence for the error, such as whom to ask for access.

    Raises:
        InfrastructureError: If that fails, with the cause and the ways around it, in one line.
        MissingExtraError: If `datasets` is not installed.
    """
    datasets = require("datasets", extra)
    away = ""
    try:
        with hub_or_disk(extra, hub_id) as away:
            table = datasets.load_dataset(hub_id, config, split=split, revision=revision)
    except Exception as error:  # whatever the network, the hub or the disk raises
        reason = f"the hub cannot be reached ({away}), and no earlier copy was found" if away else one_line(error)
        raise InfrastructureError(
            "data_unavailable",
            f"The data set {name!r} ({hub_id} at the hub) could not be loaded: {reason}. {note and f'{note} '}"
            f"With a local copy (JSON Lines, JSON, CSV or Parquet), write '{name}=PATH' in its place; HF_ENDPOINT "
            "names a mirror of the hub.",
        ) from error
    return TableRows(f"{name} ({hub_id})", table)


@contextmanager
def hub_or_disk(extra: str, source: str) -> Iterator[str]:
    """Load something from the hub inside; if the hub does not answer, only from the disk.

    Args:
        extra: The extra of this package that installs the libraries.
        source: What is loaded; of a folder the hub is not asked.

    Yields:
        Why the hub does not answer; empty if it does or is not needed.
    """
    if Path(source).is_absolute() or Path(source).is_dir():
        yield ""
        return
    places: list[Any] = [require("huggingface_hub.constants", extra)]
    if "datasets" in sys.modules:  # not to be imported for a tokenizer
        places.append(require("datasets.config", extra))
    with _lock:
        away = _why_away(extra)
        before = [place.HF_HUB_OFFLINE for place in places]
        try:
            for place in places:  # what HF_HUB_OFFLINE sets, which they read when they are imported
                place.HF_HUB_OFFLINE = bool(away) or place.HF_HUB_OFFLINE
            yield away
        finally:
            for place, value in zip(places, before, strict=True):
                place.HF_HUB_OFFLINE = value


def _why_away(extra: str) -> str:
    """Ask the hub for anything; return why there was no answer, empty if there was one."""
    constants = require("huggingface_hub.constants", extra)
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        require("huggingface_hub", extra).get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
    except Exception as error:  # of whatever library carries the requests
        return one_line(error)
    return ""


def one_line(error: Exception) -> str:
    """Return the kind of an error and what it says, without line feeds."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.') or 'no reason given'}"
