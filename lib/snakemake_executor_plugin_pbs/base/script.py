"""Script of a job: it claims the submission, does its work, and writes its exit status."""

from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote

# Exit status of a job whose submission was given up: it does nothing, which is no success.
NOT_OURS = 90
# Exit status of a job that could not write its exit-status file.
NO_RESULT = 91
PROGRESS_VARIABLE = "JOB_PROGRESS_FILE"
"""Environment variable with the file to which work writes its progress (see README.md)."""
FAILURE_VARIABLE = "JOB_FAILURE_FILE"
"""Environment variable with the file that work creates if it must not be retried; its text is the
reason."""
FAULTY_VARIABLE = "JOB_FAULTY_HOSTS_FILE"
"""Environment variable with the file to which work writes the hosts that it found faulty."""


def script(
    submissions: Sequence[tuple[Path, str]],
    id_variable: str,
    *,
    seconds: int | None = None,
    container: str = "",
) -> str:
    """Text of the script of one job.

    Args:
        submissions: folder (`records.Records`) and token of each submission; `TOKEN.job` in the
            folder is the shell script to run. A bundle has several.
        seconds: walltime. The job exports its end as PBS_JOB_END_TIME, as Slurm exports its own.
        container: image. The job exports it as JOB_CONTAINER, for its launch script.
    """
    end = f"export PBS_JOB_END_TIME=$(($(date +%s) + {seconds}))\n" if seconds else ""
    image = f"export JOB_CONTAINER={quote(container)}\n" if container else ""
    words = [word for folder, token in submissions for word in (str(folder), token)]
    return f"""\
#!/bin/bash
# Written by Snakemake's executor.
id=${id_variable}
{end}{image}{_WORK}{_BUNDLE if len(submissions) > 1 else _SINGLE}""".replace(
        "SUBMISSIONS", join(words)
    )


_WORK = f"""\
work() {{ # FOLDER TOKEN
    local claim=$1/$2.claim result=$1/$2.exit status
    # If a controller gave the submission up, it made the claim, or the record is gone.
    ln -sT "$id" "$claim" 2>/dev/null
    if [ "$(readlink "$claim")" != "$id" ] ||
        ! grep -qF "\\"token\\": \\"$2\\"" "$1/record.json"; then
        echo "$id does nothing: its submission was given up" >&2
        return {NOT_OURS}
    fi
    rm -f "$result" "$1/$2.failure" "$1/$2.faulty" "$1/$2.term" # of an earlier run of this job
    (
        trap : TERM USR1
        {PROGRESS_VARIABLE}=$1/$2.progress {FAILURE_VARIABLE}=$1/$2.failure \\
            {FAULTY_VARIABLE}=$1/$2.faulty \\
            /bin/sh -c 'trap : TERM; trap "" USR1; . "$0"' "$1/$2.job" >> "$1/$2.log" 2>&1
        echo "$?" > "$result.part"
    ) & # a signal ends `wait`, but not the work
    while kill -0 $! 2>/dev/null; do wait $!; done
    status=$(cat "$result.part") && sync "$result.part" && mv "$result.part" "$result" ||
        return {NO_RESULT}
    return "$status"
}}
# A server without history reports neither a deletion nor the end of the walltime.
note_term() {{
    terminated=yes
    [ -z "${{PBS_JOB_END_TIME:-}}" ] || for ((n = 0; n < ${{#members[@]}}; n += 2)); do
        echo "$(date +%s) $PBS_JOB_END_TIME" > "${{members[n]}}/${{members[n + 1]}}.term"
    done 2>/dev/null
}}
members=(SUBMISSIONS) terminated=
trap note_term TERM
trap 'terminated=yes' USR1
# Signals reach all processes of a job. All shells trap SIGTERM and end after the work: if one
# ended before, the job would end, and work that still saves would be killed or left behind.
# SIGUSR1 would end Snakemake, too, unless it is ignored; work that saves on it handles it.
"""

_SINGLE = """\
work "${members[@]}"
exit
"""

# The exit status of a bundle has no meaning: each submission has its own.
_BUNDLE = """\
end=${PBS_JOB_END_TIME:-${SLURM_JOB_END_TIME:-}} longest=0
set -- "${members[@]}"
while [ $# -gt 0 ] && [ -z "$terminated" ]; do
    begin=$(date +%s)
    # Stop unless there is time for twice the longest work so far; another job does the rest.
    [ -z "$end" ] || [ $((end - begin)) -gt $((2 * longest)) ] || break
    # If the batch system reruns the job, work that succeeded before is not repeated.
    [ "$(cat "$1/$2.exit" 2>/dev/null)" = 0 ] || work "$1" "$2"
    seconds=$(($(date +%s) - begin))
    [ "$seconds" -le "$longest" ] || longest=$seconds
    shift 2
done
exit 0
"""
