"""What is written before a job is submitted: a record of each task, the script, the options."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .dialect import Dialect
from .evidence import Evidence
from .records import Record, Records, new_token
from .request import job_name
from .script import script
from .tasks import Task


def are_alike(one: Task, other: Task) -> bool:
    """Whether two tasks may share a job: they are of one rule and ask for the same."""
    return one.rule == other.rule and one.request == other.request and bool(one.body)


def prepare(
    tasks: Sequence[Task],
    records: Records,
    dialect: Dialect,
    progress: Mapping[str, str],
    now: float,
) -> tuple[Path, tuple[str, ...]]:
    """Write the records of tasks, and the script of the job that they share.

    Args:
        tasks: one, or those of a bundle; each gets its record, and fresh evidence.
        records: what is on disk.
        dialect: the batch system.
        progress: key of a task to how far earlier submissions had come.
        now: seconds since 1970.

    Returns:
        The script, and the options of the submitting command.
    """
    first, bundled = tasks[0], len(tasks) > 1
    tokens = [new_token() for _ in tasks]
    name = job_name(first.rule, {} if bundled else first.wildcards, tokens[0])
    submissions = []
    for task, token in zip(tasks, tokens, strict=True):
        record = Record(
            token, name, task.key, task.outputs, task.fingerprint, written=now, bundled=bundled,
            progress=progress.get(task.key, ""),
        )  # fmt: skip
        records.write(record)
        task.record, task.evidence = record, Evidence()
        body = records.path(record, "job")
        _write(body, task.body)
        submissions.append((body.parent, token))
    assert first.record
    path = records.path(first.record, "sh")
    _write(path, script(submissions, dialect.id_variable, seconds=first.request.seconds))
    # The folder of a bundle's first task is removed before the bundle has ended.
    printed = Path(os.devnull) if bundled else records.path(first.record, dialect.label)
    return path, (*dialect.options(name, printed), *first.request.arguments)


def _write(path: Path, text: str) -> None:
    path.touch(0o700)  # it may hold values of environment variables
    path.write_text(text)
