"""How Slurm and PBS write lists of hosts, and times."""

import re


def hosts_of(nodes: str) -> list[str]:
    """Hosts of a Slurm node list: `ip-10-0-0-1,n[03-05,7]-x,r[1-2]c0s[1-2]b0n0`."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not match:
            found.append(part)
            continue
        before, numbers, after = match.groups()
        for number in numbers.split(","):
            first, _, last = number.partition("-")
            width = len(first)
            every = range(int(first), int(last or first) + 1)
            found += [host for n in every for host in hosts_of(f"{before}{n:0{width}}{after}")]
    return found


def seconds_of(told: str) -> float | None:
    """A time, [DAYS-][[HOURS:]MINUTES:]SECONDS, in seconds; None: another word, or none."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", told)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
