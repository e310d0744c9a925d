"""The script that runs as a job: claims a submission, does its work, writes its exit status."""

from collections.abc import Sequence
from pathlib import Path
from shlex import join

# A job that finds its submission given up must do nothing, and must not look like a success.
NOT_OURS = 90
# Nor may a job that could not write its exit status down, which is the second witness.
NO_RESULT = 91
PROGRESS_VARIABLE = "JOB_PROGRESS_FILE"
"""Names the file in which work may note how far it has come, in one line (see README.md)."""


def script(
    submissions: Sequence[tuple[Path, str]], id_variable: str, seconds: int | None = None
) -> str:
    """Text of the script of one job.

    Args:
        submissions: folder (`records.Records`) and token of each; `TOKEN.job` in the folder is the
            shell script to run. A bundle has several.
        id_variable: the environment variable that tells the job its id.
        seconds: its walltime. The job exports the end as PBS_JOB_END_TIME, as Slurm exports its.
    """
    end = f"export PBS_JOB_END_TIME=$(($(date +%s) + {seconds}))\n" if seconds else ""
    words = [word for folder, token in submissions for word in (str(folder), token)]
    return f"""\
#!/bin/bash
# Written by Snakemake's executor.
id=${id_variable}
{end}{_WORK}{_BUNDLE if len(submissions) > 1 else _SINGLE}""".replace("SUBMISSIONS", join(words))


_WORK = f"""\
work() {{ # FOLDER TOKEN
    local claim=$1/$2.claim result=$1/$2.exit status
    # A submission that a controller gave up has a claim of its own, or no record any more.
    ln -sT "$id" "$claim" 2>/dev/null
    if [ "$(readlink "$claim")" != "$id" ] ||
        ! grep -qF "\\"token\\": \\"$2\\"" "$1/record.json"; then
        echo "$id does nothing: its submission was given up" >&2
        return {NOT_OURS}
    fi
    rm -f "$result" # of an earlier run, if the system runs the job again
    {PROGRESS_VARIABLE}=$1/$2.progress \\
        /bin/sh -c 'trap : TERM; . "$0"' "$1/$2.job" >> "$1/$2.log" 2>&1
    status=$?
    echo "$status" > "$result.part" && sync "$result.part" && mv "$result.part" "$result" ||
        return {NO_RESULT}
    return "$status"
}}
# Signals reach all processes of a job. Both shells outlive the work: were one to die before, the
# job would be over, and what still saves or tidies up would be killed or left behind.
"""

_SINGLE = """\
trap : TERM
work SUBMISSIONS
exit
"""

# The exit status of a bundle says nothing: each submission has its own.
_BUNDLE = """\
end=${PBS_JOB_END_TIME:-${SLURM_JOB_END_TIME:-}} longest=0 terminated=
trap 'terminated=yes' TERM
set -- SUBMISSIONS
while [ $# -gt 0 ] && [ -z "$terminated" ]; do
    begin=$(date +%s)
    # There must be time for twice the longest so far; the rest goes into another job.
    [ -z "$end" ] || [ $((end - begin)) -gt $((2 * longest)) ] || break
    # If the system runs the job again, what was done before stays.
    [ "$(cat "$1/$2.exit" 2>/dev/null)" = 0 ] || work "$1" "$2"
    seconds=$(($(date +%s) - begin))
    [ "$seconds" -le "$longest" ] || longest=$seconds
    shift 2
done
exit 0
"""
