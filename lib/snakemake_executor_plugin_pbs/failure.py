"""Says why a job has failed if Snakemake would not, or would show the log of an earlier job."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import identity

LINES = 30  # of a log, from its end


def needs_own_text(job: Any, since: float) -> bool:
    """Whether Snakemake's own text about a failed job misleads.

    It drops the message of a group (`GroupJob.log_error`), and shows log files that are older than
    the job, as if the job had written them.

    Args:
        job: Snakemake's.
        since: when it was submitted, in seconds since 1970.
    """
    return bool(job.is_group()) or any(path.exists() for path in _stale(rule_logs(job), since))


def text(
    job: Any, message: str, own_log: Path | None, *, since: float, job_id: str, shows_logs: bool
) -> str:
    """What to tell of a failed job.

    Args:
        job: Snakemake's.
        message: why it failed.
        own_log: what the job printed, if it began.
        since: when it was submitted, in seconds since 1970.
        job_id: of the batch system.
        shows_logs: whether the ends of log files are wanted (--show-failed-logs).
    """
    logs = rule_logs(job)
    stale = _stale(logs, since)
    fresh = [path for path in (own_log, *logs) if path and path.exists() and path not in stale]
    lines = [f"Error in {identity.title(job)}:", f"    message: {message}"]
    if job.is_group():
        lines.append(f"    rules: {', '.join(identity.rules(job))}")
    if fresh:
        lines.append(f"    log: {', '.join(map(str, fresh))}")
    lines.append(f"    external_jobid: {job_id}")
    for path in fresh if shows_logs else ():
        lines += ["", f"The end of {path}:", *_end(path)]
    return "\n".join(lines)


def rule_logs(job: Any) -> list[Path]:
    """Log files that the rules of a job name."""
    return [Path(str(path)) for one in identity.members(job) for path in one.log]


def _stale(paths: Iterable[Path], since: float) -> list[Path]:
    """Those of some files that were last written before a time, or do not exist."""
    return [path for path in paths if not path.exists() or path.stat().st_mtime < since]


def _end(path: Path) -> Sequence[str]:
    return path.read_text(errors="replace").splitlines()[-LINES:]
