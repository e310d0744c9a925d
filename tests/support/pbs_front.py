"""Front of the commands of a real PBS, so that tests for the stand-in can run on it.

It logs the calls, makes them fail on request, and holds jobs that must not run yet. It is called as
`pbs_front.py COMMAND FOLDER BIN ARGUMENT...`; BIN is the folder of the real commands.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pbs_attributes import dump
from pbs_standin import NO_EXPRESS, Server, damaged, fail


class Front:
    """The real commands, and the folder with the faults of their calls."""

    def __init__(self, folder, programs):
        self.server, self.programs = Server(folder), Path(programs)
        self.jobs = self.server.folder / "jobs"  # an empty file for each job, named by its id
        self.held = self.server.folder / "held"
        self.held.mkdir(exist_ok=True)

    def call(self, command, *arguments):
        return subprocess.run(
            [self.programs / command, *arguments], capture_output=True, text=True, check=False
        )

    def attributes(self, ids):
        """Id to attributes of jobs, from the server."""
        result = self.call("qstat", "-E", "-x", "-f", "-F", "json", *ids) if ids else None
        return json.loads(result.stdout, strict=False).get("Jobs", {}) if result else {}

    def room(self):
        """Number of jobs that may start."""
        ids = [path.name for path in self.jobs.iterdir() if not (self.held / path.name).exists()]
        states = [job["job_state"] for job in self.attributes(ids).values()]
        return self.server.setting("slots", 1000) - sum(state != "F" for state in states)

    def release(self):
        """Release as many held jobs as may start."""
        with self.server.lock():
            for path in sorted(self.held.iterdir())[: max(self.room(), 0)]:
                self.call("qrls", path.name)
                path.unlink()


def qsub(front, arguments, fault):
    if code := front.server.refuse("qsub", fault):
        return code
    with front.server.lock():
        hold = front.room() <= 0
        result = front.call("qsub", *(["-h"] if hold else []), *arguments)
        job_id = result.stdout.strip()
        if not result.returncode:
            (front.jobs / job_id).touch()
        if hold and not result.returncode:
            (front.held / job_id).touch()
    if fault == "lost":
        return fail("qsub: Connection timed out", 110)
    if fault == "slow":
        front.server.hang()
    return repeat(result)


def qstat(front, arguments, fault):
    if code := front.server.refuse("qstat", fault):
        return code
    if fault == "empty":
        return 0
    express = "-E" in arguments
    if express and not front.server.setting("express", True):
        return fail(NO_EXPRESS, 2)
    front.release()
    result = front.call("qstat", *arguments)
    reply = json.loads(result.stdout, strict=False)
    rows, unknown, errors, code = {}, [], result.stderr, result.returncode
    for job_id, job in reply.pop("Jobs", {}).items():
        if fault == "forgetful" or number(job_id) in front.server.setting("purged", []):
            unknown.append(job_id)
        elif fault in ("lie-failed", "lie-finished"):
            failed = fault == "lie-failed"
            ending = {"job_state": "F", "substate": 92 + failed, "Exit_status": int(failed)}
            rows[job_id] = {**job, **ending}
        else:
            rows[job_id] = job
    if express:  # one request, which fails only if the server knows none of the ids
        unknown = [] if rows else unknown[-1:]
    for job_id in unknown:
        errors, code = f"{errors}qstat: Unknown Job Id {job_id}\n", 153
    if fault == "first":
        rows = dict([*rows.items()][:1])
    text = dump({**reply, **({"Jobs": rows} if rows else {})}) + "\n"
    sys.stdout.write(damaged(text, fault))
    sys.stderr.write(errors)
    return code


def number(job_id):
    return int(job_id.partition(".")[0])


def repeat(result):
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.returncode


def main():
    command, folder, programs, *arguments = sys.argv[1:]
    front = Front(folder, programs)
    front.server.note(command, arguments)
    fault = front.server.fault(command)
    if command in ("qsub", "qstat"):
        return {"qsub": qsub, "qstat": qstat}[command](front, arguments, fault)
    return front.server.refuse(command, fault) or repeat(front.call(command, *arguments))


if __name__ == "__main__":
    sys.exit(main())
