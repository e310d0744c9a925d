"""A parser of Megatron-LM's log lines, written from the format of its training.py."""

import re

Line = dict[str, str | int | float]
"""Values of a line by their names."""

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:E[-+]\d+)?"
_TRAINING = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +(\d+)/ *(\d+) \|(.*)\|"
)
_VALIDATION = re.compile(r" validation(-\w+)? loss at iteration (\d+) \|(.*)\| ")
_VALUE = re.compile(rf" ([^|:]+): +({_NUMBER}) ")


def megatron_lines(log: str) -> list[Line]:
    """Parse the lines of training and validation in a log; others are left out."""
    lines: list[Line] = []
    for text in log.splitlines():
        if match := _TRAINING.fullmatch(text):
            head = {"iteration": int(match[1]), "train iterations": int(match[2])}
            lines.append({**head, **_values(match[3])})
        elif match := _VALIDATION.fullmatch(text):
            split = {"split": match[1] or "", "iteration": int(match[2])}
            lines.append({**split, **_values(match[3])})
    return lines


def _values(text: str) -> Line:
    values = [_VALUE.fullmatch(part) for part in text.split("|")]
    return {match[1]: _number(match[2]) for match in values if match}


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)
