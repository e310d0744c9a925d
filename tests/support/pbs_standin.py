"""Stand-in for PBS: its commands run real jobs; a folder plays the server.

It has no scheduler, nodes, or users. Its output has the fields and the form of a real server's
replies (pbs_replies), and it fails on request like a real server (pbs_servers.py). It is called as
`pbs_standin.py COMMAND FOLDER ARGUMENT...` and needs only Python.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pbs_attributes import CORES, HOST, attributes, cores, dump, seconds

QUEUES = ("debug", "prod")
RESOURCES = ("select", "place", "walltime", "filesystems", "ncpus", "ngpus", "mem")
KILL_DELAY = 2.0  # seconds between SIGTERM and SIGKILL

NO_EXPRESS = "qstat: invalid option -- 'E'\nusage: \nqstat [-f] [-J] [-p] [-t] [-x]"
"""Message of some wrappers of qstat."""


class Server:
    """Folder with jobs, faults of future calls, and a log of calls."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / "jobs").mkdir(exist_ok=True)

    @contextmanager
    def lock(self):
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def setting(self, name, default):
        path = self.folder / "settings.json"
        return json.loads(path.read_text()).get(name, default) if path.exists() else default

    def fault(self, command):
        """Fault of this call: `NAME` is for one call, `NAME*` for all."""
        path = self.folder / f"{command}.faults"
        with self.lock():
            names = path.read_text().split() if path.exists() else []
            if not names:
                return ""
            if names[0].endswith("*"):
                return names[0][:-1]
            path.write_text(" ".join(names[1:]))
            return names[0]

    def hang(self):
        """Hang for ten minutes, or until the test ends."""
        deadline = time.time() + 600
        while time.time() < deadline and not (self.folder / "stopped").exists():
            time.sleep(0.1)

    def refuse(self, command, fault):
        """Exit status of a call that fails; 0, after hanging if that is the fault."""
        if fault == "down":
            return fail(f"{command}: cannot connect to server pbs01 (errno=111)", 111)
        if fault == "full":
            reason = "would exceed queue generic's per-user limit of jobs in 'Q' state"
            return fail(f"{command}: {reason}", 38)
        if fault == "hang":
            self.hang()
        return 0

    def note(self, command, arguments):
        with (self.folder / "calls").open("a") as file:
            print(json.dumps([time.time(), command, *arguments]), file=file)

    def requested(self, count):
        """Log the number of status requests that a qstat sends."""
        with (self.folder / "requests").open("a") as file:
            print(count, file=file)

    def path(self, number):
        return self.folder / "jobs" / f"{number}.json"

    def read(self, number):
        try:
            job = json.loads(self.path(number).read_text())
        except (OSError, ValueError):
            return None
        return None if job["number"] in self.setting("purged", []) else job

    def numbers(self):
        return sorted(int(path.stem) for path in (self.folder / "jobs").glob("*.json"))

    def write(self, job):
        part = self.path(job["number"]).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(job))
        part.replace(self.path(job["number"]))

    def change(self, number, **values):
        with self.lock():
            job = json.loads(self.path(number).read_text())
            job.update(values)
            self.write(job)
        return job


def parse_options(arguments):
    """Split the arguments of qsub into options as (letter, value), and the script."""
    options, rest = [], list(arguments)
    while rest and rest[0].startswith("-"):
        letter = rest.pop(0)
        options.append((letter, "" if letter in ("-h", "-V", "-z") else rest.pop(0)))
    return options, rest


def qsub(server, arguments, fault):
    if code := server.refuse("qsub", fault):
        return code
    options, rest = parse_options(arguments)
    values = {letter: value for letter, value in options if letter != "-l"}
    requested = {"select": "1:ncpus=1", "place": "free", "walltime": "01:00:00"}
    for _, text in filter(lambda option: option[0] == "-l", options):
        name, _, value = text.partition("=")
        if name not in RESOURCES:
            return fail(f"qsub: Unknown resource: {name}", 187)
        requested[name] = value
    if values.get("-q", "debug") not in QUEUES:
        return fail("qsub: Unknown queue", 170)
    with server.lock():
        number = (server.numbers() or [server.setting("first", 100) - 1])[-1] + 1
        server.write(
            {
                "number": number, "name": values.get("-N", "STDIN"), "state": "Q", "substate": 10,
                "queue": values.get("-q", "debug"), "account": values.get("-A"), "asked": requested,
                "output": values.get("-o", ""), "held": "-h" in values, "ctime": time.time(),
                "workdir": str(Path.cwd()), "arguments": " ".join(arguments[:-1]),
                "script": Path(rest[0]).read_text(), "run_count": 0,
            }
        )  # fmt: skip
    subprocess.Popen(
        [sys.executable, "-IS", __file__, "run", server.folder, str(number)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, cwd="/",
    )  # fmt: skip
    if fault == "lost":  # the job exists, but its id is not printed
        return fail("qsub: Connection timed out", 110)
    if fault == "slow":
        server.hang()
    print(f"{number}.{HOST}")
    return 0


def run(server, number):
    """Run a job from the queue to its end."""
    started = False
    while not started:
        with server.lock():
            job = json.loads(server.path(number).read_text())
            never = cores(job["asked"]["select"]) > CORES
            busy = sum(
                json.loads(server.path(other).read_text())["state"] == "R"
                for other in server.numbers()
            )
            if job.get("deleted"):
                job.update(state="F", substate=91, ended=time.time())
            elif job["held"]:
                job.update(state="H", substate=20)
            elif not never and busy < server.setting("slots", 8):
                started = True
                job.update(state="R", substate=42, stime=time.time(), run_count=1)
            else:
                job.update(state="Q", substate=10)
            server.write(job)
        if job["state"] == "F":
            return
        time.sleep(0.05)
    status, output = execute(server, job)
    deleted, late = status == "deleted", status == "walltime"
    time.sleep(server.setting("ending_seconds", 0))
    if job["output"]:
        with suppress(FileNotFoundError):  # its folder no longer exists
            Path(job["output"]).write_bytes(output)
    exit_status = 0 if deleted else -29 if late else status
    substate = 91 if deleted else 93 if exit_status else 92
    server.change(number, state="F", substate=substate, exit=exit_status, ended=time.time())


def execute(server, job):
    """Run the script in a bare environment; return exit status or cause of its kill, and output."""
    spool = server.folder / "jobs" / f"{job['number']}.out"
    script = server.folder / "jobs" / f"{job['number']}.SC"
    script.write_text(job["script"])
    nodes = server.folder / "jobs" / f"{job['number']}.nodes"
    nodes.write_text("localhost\n" * int(job["asked"]["select"].split(":")[0]))
    environment = {
        "HOME": str(Path.home()), "PATH": "/usr/bin:/bin", "SHELL": "/bin/bash",
        "LANG": "C.UTF-8", "PBS_JOBID": f"{job['number']}.{HOST}", "PBS_JOBNAME": job["name"],
        "PBS_O_WORKDIR": job["workdir"], "PBS_QUEUE": job["queue"],
        "PBS_NODEFILE": str(nodes), "PBS_ENVIRONMENT": "PBS_BATCH",
    }  # fmt: skip
    with spool.open("wb") as file:
        process = subprocess.Popen(
            ["/bin/bash", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env=environment, cwd="/", start_new_session=True,
        )  # fmt: skip
        cause, deadline = "", time.time() + seconds(job["asked"]["walltime"])
        while process.poll() is None:
            time.sleep(0.05)
            if json.loads(server.path(job["number"]).read_text()).get("deleted"):
                cause = "deleted"
            elif time.time() > deadline:
                cause = "walltime"
            if cause:
                kill_session(process)
    spool_text = spool.read_bytes()
    if cause == "walltime":
        spool_text += b"=>> PBS: job killed: walltime exceeded limit\n"
    code = process.returncode
    return cause or (256 - code if code < 0 else code), spool_text


def kill_session(process):
    """End all processes of a job: SIGTERM, then SIGKILL."""
    deadline = time.time() + KILL_DELAY
    for number in (signal.SIGTERM, signal.SIGKILL):
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) == process.pid:
                    os.kill(int(path.parent.name), number)
            except (OSError, ValueError, IndexError):
                continue
        while number == signal.SIGTERM and process.poll() is None and time.time() < deadline:
            time.sleep(0.05)
    process.wait()


def qstat(server, arguments, fault):
    if code := server.refuse("qstat", fault):
        return code
    if fault == "empty":
        return 0
    history, keeps = "-x" in arguments, server.setting("history", True)
    if history and not keeps:  # as in the source of OpenPBS
        sys.stdout.write(dump({"timestamp": int(time.time()), "pbs_version": "23.06.06"}) + "\n")
        sys.stderr.write("qstat: PBS is not configured to maintain job history\n")
        return 0
    ids = [argument for argument in arguments if argument[0].isdigit()]
    numbers = [int(job_id.split(".")[0]) for job_id in ids] if ids else server.numbers()
    express = "-E" in arguments
    if express and not server.setting("express", True):
        return fail(NO_EXPRESS, 2)
    server.requested(1 if express else len(numbers))
    numbers = sorted(numbers) if express else numbers
    rows, errors, code = {}, [], 0
    for number in numbers:
        job = server.read(number)
        gone = job is None or (job["state"] == "F" and not keeps)
        if gone or fault == "forgetful":
            code = 153
            errors.append(f"qstat: Unknown Job Id {number}.{HOST}")
        elif job["state"] == "F" and not history:
            code = 35
            errors.append(
                f"qstat: {number}.{HOST} Job has finished, use -x or -H to obtain "
                "historical job information"
            )
        else:
            rows[f"{number}.{HOST}"] = attributes(lie(job, fault))
    if express:  # one request, which fails only if the server knows none of the ids
        errors = [] if rows else errors[-1:]
        code = 0 if rows else code
    if fault == "first" or (server.setting("first_only", False) and not express):
        rows = dict(list(rows.items())[:1])  # OpenPBS after 23.06.06
    reply = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": HOST}
    text = dump({**reply, **({"Jobs": rows} if rows else {})}) + "\n"
    sys.stdout.write(damaged(text, fault))
    sys.stderr.write("".join(f"{line}\n" for line in errors))
    return code


def damaged(text, fault):
    """A reply that was cut off, or that is no JSON, as with qsub -v number=005."""
    if fault == "truncated":
        return text[: len(text) * 2 // 3]
    if fault == "malformed":
        return text.replace('"PBS_O_HOST":\t"', '"number":\t005,\n\t\t\t\t"PBS_O_HOST":\t"')
    return text


def lie(job, fault):
    """Job with the state that a faulty server reports."""
    if fault == "lie-failed":
        return {**job, "state": "F", "substate": 93, "exit": 1, "ended": time.time()}
    if fault == "lie-finished":
        return {**job, "state": "F", "substate": 92, "exit": 0, "ended": time.time()}
    return job


def qselect(server, arguments, fault):
    if code := server.refuse("qselect", fault):
        return code
    name = arguments[arguments.index("-N") + 1]
    for number in server.numbers():
        job = server.read(number)
        if job and job["name"] == name and job["state"] != "F":
            print(f"{number}.{HOST}")
    return 0


def qdel(server, arguments, fault):
    if code := server.refuse("qdel", fault):
        return code
    code = 0
    for job_id in arguments:
        job = server.read(int(job_id.split(".")[0]))
        if job is None:
            code = fail(f"qdel: Unknown Job Id {job_id}", 153)
        elif job["state"] == "F":
            code = fail(f"qdel: Job has finished {job_id}", 35)
        else:
            server.change(job["number"], deleted=True)
    return code


def qrls(server, arguments, fault):
    for job_id in arguments:
        server.change(int(job_id.split(".")[0]), held=False)
    return 0


def fail(message, code):
    print(message, file=sys.stderr)
    return code


def main():
    command, folder, *arguments = sys.argv[1:]
    server = Server(folder)
    if command == "run":
        run(server, int(arguments[0]))
        return 0
    server.note(command, arguments)
    commands = {"qsub": qsub, "qstat": qstat, "qselect": qselect, "qdel": qdel, "qrls": qrls}
    return commands[command](server, arguments, server.fault(command))


if __name__ == "__main__":
    sys.exit(main())
