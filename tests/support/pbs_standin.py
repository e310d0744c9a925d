"""A stand-in for PBS: its commands, which really run jobs; a folder is the server.

It is no PBS: it has no scheduler, nodes, or users. What it prints has the fields and the form of a
real server's replies (pbs_replies), and it can be told to fail as real ones do (pbs_servers.py).
Called as `pbs_standin.py COMMAND FOLDER ARGUMENT...`; it needs nothing but Python.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "pbs01"
CORES = 16  # of all nodes together
QUEUES = ("debug", "prod")
RESOURCES = ("select", "place", "walltime", "filesystems", "ncpus", "ngpus", "mem")
KILL_DELAY = 2.0  # seconds between SIGTERM and SIGKILL


class Server:
    """The folder: jobs, faults that are to come, a log of calls."""

    def __init__(self, folder):
        self.folder = Path(folder)
        (self.folder / "jobs").mkdir(exist_ok=True)

    @contextmanager
    def lock(self):
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def setting(self, name, otherwise):
        path = self.folder / "settings.json"
        return json.loads(path.read_text()).get(name, otherwise) if path.exists() else otherwise

    def fault(self, command):
        """The fault that this call is to have: `NAME` once, `NAME*` always."""
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
        """Say nothing for ten minutes, unless the test is over."""
        deadline = time.time() + 600
        while time.time() < deadline and not (self.folder / "stopped").exists():
            time.sleep(0.1)

    def note(self, command, arguments):
        with (self.folder / "calls").open("a") as file:
            print(json.dumps([time.time(), command, *arguments]), file=file)

    def requested(self, count):
        """Note how many status requests a qstat sends."""
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


def options(arguments):
    """Options of qsub as (letter, value), and the script."""
    found, rest = [], list(arguments)
    while rest and rest[0].startswith("-"):
        letter = rest.pop(0)
        found.append((letter, "" if letter in ("-h", "-V", "-z") else rest.pop(0)))
    return found, rest


def cores(select):
    """Cores that a select line asks for."""
    total = 0
    for part in select.split("+"):
        count, _, rest = part.partition(":")
        match = re.search(r"ncpus=(\d+)", rest)
        total += int(count) * (int(match[1]) if match else 1)
    return total


def seconds(walltime):
    """HH:MM:SS, or seconds, in seconds."""
    total = 0
    for part in walltime.split(":"):
        total = total * 60 + int(part)
    return total


def qsub(server, arguments, fault):
    if fault == "down":
        return fail("qsub: cannot connect to server pbs01 (errno=111)", 111)
    if fault == "full":
        return fail("qsub: would exceed queue generic's per-user limit of jobs in 'Q' state", 38)
    if fault == "hang":
        server.hang()
    given, rest = options(arguments)
    values = {letter: value for letter, value in given if letter != "-l"}
    asked = {"select": "1:ncpus=1", "place": "free", "walltime": "01:00:00"}
    for _, text in filter(lambda option: option[0] == "-l", given):
        name, _, value = text.partition("=")
        if name not in RESOURCES:
            return fail(f"qsub: Unknown resource: {name}", 187)
        asked[name] = value
    if values.get("-q", "debug") not in QUEUES:
        return fail("qsub: Unknown queue", 170)
    with server.lock():
        number = (server.numbers() or [server.setting("first", 100) - 1])[-1] + 1
        server.write(
            {
                "number": number, "name": values.get("-N", "STDIN"), "state": "Q", "substate": 10,
                "queue": values.get("-q", "debug"), "account": values.get("-A"), "asked": asked,
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
    if fault == "lost":  # the job is there, and its id is never told
        return fail("qsub: Connection timed out", 110)
    if fault == "slow":
        server.hang()
    print(f"{number}.{HOST}")
    return 0


def run(server, number):
    """Take a job through its life."""
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
        with suppress(FileNotFoundError):  # its folder is gone: not delivered, no more
            Path(job["output"]).write_bytes(output)
    exit_status = 0 if deleted else -29 if late else status
    substate = 91 if deleted else 93 if exit_status else 92
    server.change(number, state="F", substate=substate, exit=exit_status, ended=time.time())


def execute(server, job):
    """Run the script in a bare environment; its exit status, or why it was killed, and output."""
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
        why, deadline = "", time.time() + seconds(job["asked"]["walltime"])
        while process.poll() is None:
            time.sleep(0.05)
            if json.loads(server.path(job["number"]).read_text()).get("deleted"):
                why = "deleted"
            elif time.time() > deadline:
                why = "walltime"
            if why:
                kill_session(process)
    spool_text = spool.read_bytes()
    if why == "walltime":
        spool_text += b"=>> PBS: job killed: walltime exceeded limit\n"
    code = process.returncode
    return why or (256 - code if code < 0 else code), spool_text


def kill_session(process):
    """End all processes of a job: first politely."""
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
    if fault == "down":
        return fail("qstat: cannot connect to server pbs01 (errno=111)", 111)
    if fault == "hang":
        server.hang()
    if fault == "empty":
        return 0
    history, keeps = "-x" in arguments, server.setting("history", True)
    if history and not keeps:  # as OpenPBS's server and qstat do, by their source
        sys.stdout.write(dump({"timestamp": int(time.time()), "pbs_version": "23.06.06"}) + "\n")
        sys.stderr.write("qstat: PBS is not configured to maintain job history\n")
        return 0
    ids = [argument for argument in arguments if argument[0].isdigit()]
    numbers = [int(one.split(".")[0]) for one in ids] if ids else server.numbers()
    express = "-E" in arguments
    if express and not server.setting("express", True):  # as a site's wrapper of qstat may
        return fail("qstat: invalid option -- 'E'\nusage: \nqstat [-f] [-J] [-p] [-t] [-x]", 2)
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
    if fault == "truncated":
        text = text[: len(text) * 2 // 3]
    if fault == "malformed":  # as with qsub -v number=005
        text = text.replace('"PBS_O_HOST":\t"', '"number":\t005,\n\t\t\t\t"PBS_O_HOST":\t"')
    sys.stdout.write(text)
    sys.stderr.write("".join(f"{line}\n" for line in errors))
    return code


def lie(job, fault):
    """A job as a confused server tells of it."""
    if fault == "lie-failed":
        return {**job, "state": "F", "substate": 93, "exit": 1, "ended": time.time()}
    if fault == "lie-finished":
        return {**job, "state": "F", "substate": 92, "exit": 0, "ended": time.time()}
    return job


def attributes(job):
    """A job's attributes, in the order and form of a real reply."""
    number, ran, ended = job["number"], "stime" in job, "ended" in job
    asked = job["asked"]
    hours = f"{seconds(asked['walltime']) // 3600:02}"
    walltime = (
        f"{hours}:{seconds(asked['walltime']) // 60 % 60:02}:{seconds(asked['walltime']) % 60:02}"
    )
    used = int(job.get("ended", time.time()) - job.get("stime", time.time()))
    where = f"({HOST}:ncpus=1)"
    found = {"Job_Name": job["name"], "Job_Owner": f"root@{HOST}"}
    if ran:
        found["resources_used"] = {
            "cpupercent": 0, "cput": "00:00:00", "mem": "0kb", "ncpus": 1, "vmem": "0kb",
            "walltime": f"00:{used // 60:02}:{used % 60:02}",
        }  # fmt: skip
    found |= {"job_state": job["state"], "queue": job["queue"], "server": HOST}
    if job["account"]:
        found["Account_Name"] = job["account"]
    found |= {
        "Checkpoint": "u", "ctime": stamp(job["ctime"]),
        "Error_Path": f"{HOST}:{job['workdir']}/{job['name']}.e{number}",
    }  # fmt: skip
    if ran:
        found |= {"exec_host": f"{HOST}/0", "exec_vnode": where}
    found |= {
        "Hold_Types": "u" if job["held"] else "n", "Join_Path": "oe", "Keep_Files": "n",
        "Mail_Points": "a", "mtime": stamp(job.get("ended", job.get("stime", job["ctime"]))),
        "Output_Path": f"{HOST}:{job['output']}", "Priority": 0, "qtime": stamp(job["ctime"]),
        "Rerunable": "True",
        "Resource_List": {
            **({"filesystems": asked["filesystems"]} if "filesystems" in asked else {}),
            "ncpus": cores(asked["select"]), "nodect": int(asked["select"].split(":")[0]),
            "place": asked["place"], "select": asked["select"], "walltime": walltime,
        },
        "schedselect": asked["select"],
    }  # fmt: skip
    if ran:
        found["stime"] = stamp(job["stime"])
        if ended:
            found["obittime"] = stamp(job["ended"])
        found |= {"session_id": 10000 + number, "jobdir": str(Path.home())}
    found["substate"] = job["substate"]
    found["Variable_List"] = {
        "PBS_O_HOME": "/home/user", "PBS_O_LANG": "C.UTF-8", "PBS_O_PATH": "/usr/bin:/bin",
        "PBS_O_SHELL": "/bin/bash", "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "", "PBS_O_WORKDIR": job["workdir"],
        "PBS_O_SYSTEM": "Linux", "PBS_O_QUEUE": job["queue"], "PBS_O_HOST": HOST,
    }  # fmt: skip
    found |= {"euser": "root", "egroup": "root"}
    if ran:
        found["hashname"] = f"{number}.{HOST}"
    found |= {"queue_rank": 1795255324000000 + number, "queue_type": "E"}
    if comment := comment_of(job, where):
        found["comment"] = comment
    if not job["held"]:
        found["etime"] = stamp(job["ctime"])
    if ran:
        found["run_count"] = job["run_count"]
    if ended and ran:
        found |= {"Stageout_status": 1, "Exit_status": job["exit"]}
    found["Submit_arguments"] = job["arguments"]
    if ended:
        found["history_timestamp"] = int(job["ended"])
    found["project"] = "_pbs_project_default"
    if ran:
        found["run_version"] = 1
    return {**found, "Submit_Host": HOST}


def comment_of(job, where):
    if "stime" in job:
        day = time.strftime("%a %b %d at %H:%M", time.localtime(job["stime"]))
        end = ""
        if "ended" in job:
            end = {91: f" and terminated by root@{HOST}", 92: " and finished"}.get(
                job["substate"],
                " and exceeded resource walltime" if job["exit"] == -29 else " and failed",
            )
        return f"Job run at {day} on {where}{end}"
    wanted = cores(job["asked"]["select"])
    if job["state"] == "Q" and wanted > CORES:
        return (
            "Can Never Run: Insufficient amount of resource: ncpus "
            f"(R: {wanted} A: {CORES} T: {CORES})"
        )
    return ""


def stamp(when):
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(when))


def dump(value, depth=1):
    """JSON as PBS writes it: one attribute a line, with tabs."""
    if not isinstance(value, dict):
        return json.dumps(value)
    tab = "\t" * depth
    lines = [f"{tab}{json.dumps(key)}:\t{dump(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "\t" * (depth - 1) + "}"


def qselect(server, arguments, fault):
    if fault == "down":
        return fail("qselect: cannot connect to server pbs01 (errno=111)", 111)
    name = arguments[arguments.index("-N") + 1]
    for number in server.numbers():
        job = server.read(number)
        if job and job["name"] == name and job["state"] != "F":
            print(f"{number}.{HOST}")
    return 0


def qdel(server, arguments, fault):
    if fault == "down":
        return fail("qdel: cannot connect to server pbs01 (errno=111)", 111)
    code = 0
    for one in arguments:
        job = server.read(int(one.split(".")[0]))
        if job is None:
            code = fail(f"qdel: Unknown Job Id {one}", 153)
        elif job["state"] == "F":
            code = fail(f"qdel: Job has finished {one}", 35)
        else:
            server.change(job["number"], deleted=True)
    return code


def qrls(server, arguments, fault):
    for one in arguments:
        server.change(int(one.split(".")[0]), held=False)
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
