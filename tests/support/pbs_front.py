"""Stands before a real PBS's commands, so that tests of the stand-in can use that server, too.

It notes the calls, has them fail as told, and keeps jobs from running by holding them. Called as
`pbs_front.py COMMAND FOLDER BIN ARGUMENT...`; BIN is where the real commands are.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pbs_standin import Server, dump, fail


class Front:
    """The real commands, and the folder that says what is to become of their calls."""

    def __init__(self, folder, programs):
        self.server, self.programs = Server(folder), Path(programs)
        self.jobs = self.server.folder / "jobs"  # an empty file a job, named by its id
        self.held = self.server.folder / "held"
        self.held.mkdir(exist_ok=True)

    def call(self, command, *arguments):
        return subprocess.run(
            [self.programs / command, *arguments], capture_output=True, text=True, check=False
        )

    def attributes(self, ids):
        """What the server tells of jobs, by their ids."""
        found = self.call("qstat", "-E", "-x", "-f", "-F", "json", *ids) if ids else None
        return json.loads(found.stdout, strict=False).get("Jobs", {}) if found else {}

    def room(self):
        """How many more jobs may run."""
        ids = [path.name for path in self.jobs.iterdir() if not (self.held / path.name).exists()]
        states = [job["job_state"] for job in self.attributes(ids).values()]
        return self.server.setting("slots", 1000) - sum(state != "F" for state in states)

    def release(self):
        """Let as many of the held jobs run as may."""
        with self.server.lock():
            for path in sorted(self.held.iterdir())[: max(self.room(), 0)]:
                self.call("qrls", path.name)
                path.unlink()


def qsub(front, arguments, fault):
    if fault == "down":
        return fail("qsub: cannot connect to server pbs01 (errno=111)", 111)
    if fault == "full":
        return fail("qsub: would exceed queue generic's per-user limit of jobs in 'Q' state", 38)
    if fault == "hang":
        front.server.hang()
    with front.server.lock():
        waits = front.room() <= 0
        done = front.call("qsub", *(["-h"] if waits else []), *arguments)
        job_id = done.stdout.strip()
        if not done.returncode:
            (front.jobs / job_id).touch()
        if waits and not done.returncode:
            (front.held / job_id).touch()
    if fault == "lost":
        return fail("qsub: Connection timed out", 110)
    if fault == "slow":
        front.server.hang()
    return repeat(done)


def qstat(front, arguments, fault):
    if fault == "down":
        return fail("qstat: cannot connect to server pbs01 (errno=111)", 111)
    if fault == "hang":
        front.server.hang()
    if fault == "empty":
        return 0
    express = "-E" in arguments
    if express and not front.server.setting("express", True):
        return fail("qstat: invalid option -- 'E'\nusage: \nqstat [-f] [-J] [-p] [-t] [-x]", 2)
    front.release()
    done = front.call("qstat", *arguments)
    reply = json.loads(done.stdout, strict=False)
    rows, unknown, errors, code = {}, [], done.stderr, done.returncode
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
    if fault == "truncated":
        text = text[: len(text) * 2 // 3]
    if fault == "malformed":
        text = text.replace('"PBS_O_HOST":\t"', '"number":\t005,\n\t\t\t\t"PBS_O_HOST":\t"')
    sys.stdout.write(text)
    sys.stderr.write(errors)
    return code


def number(job_id):
    return int(job_id.partition(".")[0])


def others(command):
    """A command that is passed on, unless it cannot reach the server."""

    def run(front, arguments, fault):
        if fault == "down":
            return fail(f"{command}: cannot connect to server pbs01 (errno=111)", 111)
        return repeat(front.call(command, *arguments))

    return run


def repeat(done):
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def main():
    command, folder, programs, *arguments = sys.argv[1:]
    front = Front(folder, programs)
    front.server.note(command, arguments)
    run = {"qsub": qsub, "qstat": qstat}.get(command, others(command))
    return run(front, arguments, front.server.fault(command))


if __name__ == "__main__":
    sys.exit(main())
