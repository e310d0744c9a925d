"""The script that runs as a job: claims the submission, does the work, writes its exit status."""

from pathlib import Path
from shlex import quote

# A job that finds its submission given up must do nothing, and must not look like a success.
NOT_OURS = 90
# Nor may a job that could not write its exit status down, which is the second witness.
NO_RESULT = 91


def script(folder: Path, token: str, id_variable: str, seconds: int | None = None) -> str:
    """Text of the script of one submission.

    Args:
        folder: of the job (`records.Records`), in which `TOKEN.job` is the shell script to run.
        token: of the submission.
        id_variable: the environment variable that tells the job its id.
        seconds: its walltime, which the job is told the end of, as Slurm tells it.
    """
    files = {
        kind: quote(str(folder / f"{token}.{kind}")) for kind in ("claim", "exit", "job", "log")
    }
    end = f"export PBS_JOB_END_TIME=$(($(date +%s) + {seconds}))\n" if seconds else ""
    return f"""\
#!/bin/bash
# Written by Snakemake's executor.
id=${id_variable}
claim={files["claim"]}
result={files["exit"]}
# A submission that a controller gave up has a claim of its own, or no record any more.
ln -sT "$id" "$claim" 2>/dev/null
if [ "$(readlink "$claim")" != "$id" ] ||
    ! grep -qF {quote(f'"token": "{token}"')} {quote(str(folder / "record.json"))}; then
    echo "$id does nothing: its submission was given up" >&2
    exit {NOT_OURS}
fi
rm -f "$result" # of an earlier run, where the system runs the job again
# Signals reach all processes of a job. Both shells outlive the work: were one to die before, the
# job would be over, and what still saves or tidies up would be killed or left behind.
{end}trap : TERM
/bin/sh -c 'trap : TERM; . "$0"' {files["job"]} >> {files["log"]} 2>&1
status=$?
echo "$status" > "$result.part" && sync "$result.part" && mv "$result.part" "$result" ||
    exit {NO_RESULT}
exit "$status"
"""
