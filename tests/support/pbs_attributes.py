"""Attributes of a job of the stand-in as a real qstat prints them. It needs only Python."""

import json
import re
import time
from pathlib import Path

HOST = "pbs01"
CORES = 16  # of all nodes together


def cores(select):
    """Number of cores that a select line requests."""
    total = 0
    for part in select.split("+"):
        count, _, rest = part.partition(":")
        match = re.search(r"ncpus=(\d+)", rest)
        total += int(count) * (int(match[1]) if match else 1)
    return total


def seconds(walltime):
    """Convert HH:MM:SS, or seconds, to seconds."""
    total = 0
    for part in walltime.split(":"):
        total = total * 60 + int(part)
    return total


def attributes(job):
    """Attributes of a job, in the order and form of a real reply."""
    number, ran, ended = job["number"], "stime" in job, "ended" in job
    requested = job["asked"]
    total = seconds(requested["walltime"])
    walltime = f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"
    used = int(job.get("ended", time.time()) - job.get("stime", time.time()))
    where = f"({HOST}:ncpus=1)"
    reply = {"Job_Name": job["name"], "Job_Owner": f"root@{HOST}"}
    if ran:
        reply["resources_used"] = {
            "cpupercent": 0, "cput": "00:00:00", "mem": "0kb", "ncpus": 1, "vmem": "0kb",
            "walltime": f"00:{used // 60:02}:{used % 60:02}",
        }  # fmt: skip
    reply |= {"job_state": job["state"], "queue": job["queue"], "server": HOST}
    if job["account"]:
        reply["Account_Name"] = job["account"]
    reply |= {
        "Checkpoint": "u", "ctime": stamp(job["ctime"]),
        "Error_Path": f"{HOST}:{job['workdir']}/{job['name']}.e{number}",
    }  # fmt: skip
    if ran:
        reply |= {"exec_host": f"{HOST}/0", "exec_vnode": where}
    reply |= {
        "Hold_Types": "u" if job["held"] else "n", "Join_Path": "oe", "Keep_Files": "n",
        "Mail_Points": "a", "mtime": stamp(job.get("ended", job.get("stime", job["ctime"]))),
        "Output_Path": f"{HOST}:{job['output']}", "Priority": 0, "qtime": stamp(job["ctime"]),
        "Rerunable": "True",
        "Resource_List": {
            **({"filesystems": requested["filesystems"]} if "filesystems" in requested else {}),
            "ncpus": cores(requested["select"]), "nodect": int(requested["select"].split(":")[0]),
            "place": requested["place"], "select": requested["select"], "walltime": walltime,
        },
        "schedselect": requested["select"],
    }  # fmt: skip
    if ran:
        reply["stime"] = stamp(job["stime"])
        if ended:
            reply["obittime"] = stamp(job["ended"])
        reply |= {"session_id": 10000 + number, "jobdir": str(Path.home())}
    reply["substate"] = job["substate"]
    reply["Variable_List"] = {
        "PBS_O_HOME": "/home/user", "PBS_O_LANG": "C.UTF-8", "PBS_O_PATH": "/usr/bin:/bin",
        "PBS_O_SHELL": "/bin/bash", "PBS_O_INTERACTIVE_AUTH_METHOD": "resvport",
        "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "", "PBS_O_WORKDIR": job["workdir"],
        "PBS_O_SYSTEM": "Linux", "PBS_O_QUEUE": job["queue"], "PBS_O_HOST": HOST,
    }  # fmt: skip
    reply |= {"euser": "root", "egroup": "root"}
    if ran:
        reply["hashname"] = f"{number}.{HOST}"
    reply |= {"queue_rank": 1795255324000000 + number, "queue_type": "E"}
    if comment := comment_of(job, where):
        reply["comment"] = comment
    if not job["held"]:
        reply["etime"] = stamp(job["ctime"])
    if ran:
        reply["run_count"] = job["run_count"]
    if ended and ran:
        reply |= {"Stageout_status": 1, "Exit_status": job["exit"]}
    reply["Submit_arguments"] = job["arguments"]
    if ended:
        reply["history_timestamp"] = int(job["ended"])
    reply["project"] = "_pbs_project_default"
    if ran:
        reply["run_version"] = 1
    return {**reply, "Submit_Host": HOST}


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
    num_cores = cores(job["asked"]["select"])
    if job["state"] == "Q" and num_cores > CORES:
        return (
            "Can Never Run: Insufficient amount of resource: ncpus "
            f"(R: {num_cores} A: {CORES} T: {CORES})"
        )
    return ""


def stamp(when):
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(when))


def dump(value, depth=1):
    """JSON as PBS writes it: one attribute per line, with tabs."""
    if not isinstance(value, dict):
        return json.dumps(value)
    tab = "\t" * depth
    lines = [f"{tab}{json.dumps(key)}:\t{dump(item, depth + 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "\t" * (depth - 1) + "}"
