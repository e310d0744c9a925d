"""Logger plug-in of Snakemake: one line a stage in place of a block of lines a job.

`snakemake --logger tokamake` prints them to standard error. `tokamake run` starts Snakemake with
the number of a pipe in TOKAMAKE_EVENTS, and shows the events itself, beside what jobs print.
"""

import json
import logging
import os
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

EVENTS = "TOKAMAKE_EVENTS"
"""Environment variable: number of a file descriptor for events, one JSON object a line."""


class LogHandler(LogHandlerBase):
    """Makes events of Snakemake's records, see `event_of`; writes or shows them."""

    def __post_init__(self) -> None:
        # Jobs inherit the environment, but not the pipe.
        descriptor = os.environ.pop(EVENTS, "")
        self._pipe = os.fdopen(int(descriptor), "w", encoding="utf-8") if descriptor else None
        self._display: Any = None
        if self._pipe is None:
            from tokamake.run.display import Display

            self._display = Display(is_dry_run=self.common_settings.dryrun)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        event = event_of(record)
        if event is None:
            return
        try:
            if self._pipe is not None:
                self._pipe.write(json.dumps(event) + "\n")
                self._pipe.flush()
            else:
                self._display.show(event)
        except BrokenPipeError:  # nobody reads any more; the workflow goes on
            pass
        except Exception:  # as in each handler of Python: an error here ends no workflow
            self.handleError(record)

    def close(self) -> None:
        """End the display."""
        if self._display is not None:
            self._display.close()
        super().close()

    @property
    def writes_to_stream(self) -> bool:
        return True

    @property
    def writes_to_file(self) -> bool:
        return False

    @property
    def has_filter(self) -> bool:
        return True

    @property
    def has_formatter(self) -> bool:
        return True

    @property
    def needs_rulegraph(self) -> bool:
        return False


def event_of(record: logging.LogRecord) -> dict[str, Any] | None:
    """A record as an event: `kind` and its fields; None: a display does not need it.

    Kinds: plan (counts), begin, finish, fail, message (level, text).
    """
    fields: Any = record  # Snakemake adds attributes
    match getattr(record, "event", None):
        case LogEvent.RUN_INFO:
            return {"kind": "plan", "counts": fields.stats}
        case LogEvent.JOB_INFO:
            return {
                "kind": "begin",
                "jobid": fields.jobid,
                "rule": fields.rule_name,
                "wildcards": {**fields.wildcards},
                "reason": fields.reason,
                "output": [*map(str, fields.output)],
                "log": [*map(str, fields.log)],
            }
        case LogEvent.JOB_FINISHED:
            return {"kind": "finish", "jobid": fields.job_id}
        case LogEvent.JOB_ERROR:
            return {
                "kind": "fail",
                "jobid": fields.jobid,
                "rule": fields.rule_name,
                "log": [*map(str, fields.log)],
                "aux": {name: str(value) for name, value in fields.aux.items()},
            }
        case LogEvent.GROUP_ERROR:
            jobs = fields.job_error_info
            logs = [str(path) for job in jobs for path in job["log"]]
            names = " and ".join(dict.fromkeys(job["rule_name"] for job in jobs))
            return {"kind": "fail", "jobid": None, "rule": names, "log": logs, "aux": {}}
        case None | LogEvent.ERROR:
            text = record.getMessage().strip() if record.msg else ""
            return {"kind": "message", "level": record.levelname, "text": text} if text else None
    return None
