"""Lists of hosts and times as Slurm and PBS write them."""

import re


def hosts_of(nodes: str) -> list[str]:
    """Expand a Slurm node list: `ip-10-0-0-1,n[03-05,7]-x,r[1-2]c0s[1-2]b0n0`."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not match:
            hosts.append(part)
            continue
        before, numbers, after = match.groups()
        for number in numbers.split(","):
            first, _, last = number.partition("-")
            width = len(first)
            span = range(int(first), int(last or first) + 1)
            # `after` may contain another bracket.
            hosts += [host for n in span for host in hosts_of(f"{before}{n:0{width}}{after}")]
    return hosts


def seconds_of(text: str) -> float | None:
    """Parse a time, [DAYS-][[HOURS:]MINUTES:]SECONDS, to seconds; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
