"""Tables of tasks that are read from records."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from trace_gym.envs.math.tasks.noise import Noise, normalized, without_noise
from trace_gym.envs.math.tasks.readers import read_record
from trace_gym.envs.math.tasks.task import Task, TaskTable
from trace_gym.envs.record_files import Record, Rows, file_name, open_rows
from trace_gym.envs.task_table import EVAL_SHARE, check_split, side_of_text
from trace_gym.errors import BadInputError


class RowTable(TaskTable):
    """Tasks of one data set. The id of a task is the set's name and the number of its record, from 1.

    Every record is read once, so that a bad one is found at once; then only its number is kept.

    Attributes:
        noise: What was left out, if noise was to be removed.
    """

    def __init__(self, name: str, rows: Rows, split: str | None = None, clean: bool = False) -> None:
        """Read the records.

        Args:
            name: Name of the set.
            rows: The records.
            split: ``"eval"`` for the one question in five that is held out, by a digest of its text in any spelling;
                ``"train"`` for the others; None for all.
            clean: Leave out records that cannot be used or trusted, see `trace_gym.envs.math.tasks.noise`. Otherwise
                a record that cannot be read is an error.

        Raises:
            BadInputError: If a record cannot be read or no task is left.
        """
        if split is not None:
            check_split(split)
        self.name = name
        self._rows = rows
        self.noise = Noise() if clean else None
        numbered = self._read_all()
        if split is not None:
            numbered = (pair for pair in numbered if side_of_text(normalized(pair[1].question)) == split)
        kept = (index for index, _ in numbered) if self.noise is None else without_noise(numbered, self.noise)
        self._kept = array("Q", kept)
        if not self._kept:
            raise BadInputError(_nothing(rows, split))
        super().__init__(f"{name}-{index + 1:06d}" for index in self._kept)

    def get(self, task_id: str) -> Task:
        """Return the task of an id.

        Raises:
            BadInputError: If there is no such task; the message has the nearest id or the first and last.
        """
        digits = task_id.rpartition("-")[2]
        index = int(digits) - 1 if digits.isascii() and digits.isdecimal() and len(digits) < 19 else -1
        place = bisect_left(self._kept, index) if index >= 0 else 0
        if self.ids[place : place + 1] != (task_id,):
            raise self.unknown(task_id)
        return self._task(index, self._rows[index])

    def _read_all(self) -> Iterator[tuple[int, Task]]:
        for index, record in enumerate(self._rows):
            try:
                yield index, self._task(index, record)
            except BadInputError as error:
                if self.noise is None:
                    raise BadInputError(f"{self._rows.place(index)}: {error}") from None
                self.noise.unusable += 1

    def _task(self, index: int, record: Record) -> Task:
        said = read_record(record)
        return Task(
            f"{self.name}-{index + 1:06d}",
            said.question,
            said.answer,
            self.name,
            said.difficulty,
            options=said.options,
            subject=said.subject,
        )


class JoinedTable(TaskTable):
    """The tasks of several data sets, one after the other."""

    def __init__(self, tables: Sequence[RowTable]) -> None:
        """Join the tables.

        Raises:
            BadInputError: If two have the same name, as their tasks would have the same ids.
        """
        self._tables = {table.name: table for table in tables}
        if len(self._tables) < len(tables):
            names = ", ".join(table.name for table in tables)
            raise BadInputError(
                f"Each data set needs a name of its own; got {names}. Name files like this: 'one=PATH', 'two=PATH'."
            )
        super().__init__(task_id for table in tables for task_id in table)

    def get(self, task_id: str) -> Task:
        """Return the task of an id.

        Raises:
            BadInputError: If there is no such task.
        """
        table = self._tables.get(task_id.rpartition("-")[0])
        if table is None:
            raise self.unknown(task_id)
        return table.get(task_id)


def load_tasks(path: str | Path, split: str | None = None) -> RowTable:
    """Read the tasks of a local file, see `trace_gym.envs.record_files` for its form and `readers` for its columns.

    Args:
        path: The file; its name without the endings is the name of the set.
        split: ``"train"``, ``"eval"`` or None for all, see `RowTable`.

    Raises:
        BadInputError: If the file cannot be read or a record does not have what is needed; the message
            names the file, the line (or the record of an array) and what was expected.
        MissingExtraError: If the file needs a library that is not installed.
    """
    file = Path(path)
    return RowTable(file_name(file), open_rows(file), split)


def _nothing(rows: Rows, split: str | None) -> str:
    if not len(rows):
        return f"{rows.source} holds no tasks; expected one JSON object per line, or an array."
    if split is None:
        return f"{rows.source} has no task with a usable answer among its {len(rows)} records."
    return f"{rows.source} has no task in the {split} split; one question in {EVAL_SHARE} is held out."
