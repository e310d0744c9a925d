"""Error text of a failed job, for cases in which Snakemake's own text is wrong."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import identity
from .snakemake_internals import members

NUM_LINES = 30  # last lines of a log to show


def needs_own_text(job: Any, submitted: float) -> bool:
    """Whether Snakemake's text about a failed job, `submitted` in seconds since 1970, is wrong.

    Snakemake drops the message of a group (`GroupJob.log_error`), and shows log files that are
    older than the job, as if the job had written them.
    """
    return bool(job.is_group()) or any(path.exists() for path in _stale(rule_logs(job), submitted))


def text(
    job: Any, message: str, own_log: Path | None, *, submitted: float, job_id: str, show_logs: bool
) -> str:
    """Error text of a failed job, in Snakemake's form; `own_log`: its output, if it started."""
    logs = rule_logs(job)
    stale = _stale(logs, submitted)
    fresh = [path for path in (own_log, *logs) if path and path.exists() and path not in stale]
    lines = [f"Error in {identity.title(job)}:", f"    message: {message}"]
    if job.is_group():
        lines.append(f"    rules: {', '.join(identity.rules(job))}")
    if fresh:
        lines.append(f"    log: {', '.join(map(str, fresh))}")
    lines.append(f"    external_jobid: {job_id}")
    for path in fresh if show_logs else ():
        lines += ["", f"The end of {path}:", *_end(path)]
    return "\n".join(lines)


def rule_logs(job: Any) -> list[Path]:
    return [Path(str(path)) for member in members(job) for path in member.log]


def _stale(paths: Iterable[Path], submitted: float) -> list[Path]:
    """Files that were last written before the submission, or do not exist."""
    return [path for path in paths if not path.exists() or path.stat().st_mtime < submitted]


def _end(path: Path) -> Sequence[str]:
    return path.read_text(errors="replace").splitlines()[-NUM_LINES:]
