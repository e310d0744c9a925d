"""The exception for mistakes of the user. The command line prints it without a traceback."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOST_DIVISORS = 12
EXIT_USER_ERROR = 2
"""Exit status of commands and of Snakemake after a mistake of the user."""


class UserError(Exception):
    """A mistake that the user can fix. The message gives the subject, value, place and remedy.

    `among_ranks`: a process group exists, whose threads can make a normal exit of Python abort.
    """

    among_ranks = False

    def __init__(self, message: str = "") -> None:
        """Hide passwords of addresses, and escape characters that change a terminal."""
        text = re.sub(r"((?:https?|socks\w*)://)[^/\s]*@", r"\1***@", message)
        super().__init__(
            "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
        )


class SignalExit(SystemExit):
    """A signal ends the command. A SystemExit of a user's own code is no such end."""


class TemporaryError(UserError):
    """An error of the system, the network or another process, which a retry may not meet."""


def nearest(name: str, known: Iterable[str], *, first: Iterable[str] = ()) -> str:
    """Question with the known names that are close to an unknown one; empty if none is.

    Args:
        first: further names, which the question lists in any case.
    """
    from difflib import get_close_matches

    known = [*known]
    near = get_close_matches(name, known, n=2, cutoff=0.7)
    longer = [each for each in known if len(name) > 1 and each.startswith(name)]
    close = [*first, *(near or longer[:2])]
    return f"did you mean {' or '.join(close)}?" if close else ""


def choice(name: str, known: Iterable[str], *, other: str = "") -> str:
    """Remedy for an unknown name: the known names that are close to it, or else all of them.

    Args:
        other: what the name can be beside a known one; it follows the list.
    """
    known = [*known]
    return nearest(name, known) or f"choose one of {', '.join(known)}{other}"


def divisor(number: int) -> str:
    """Divisors of a number as a remedy; only the number, if there are many."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    if len(divisors) > _MOST_DIVISORS:
        return f"a divisor of {number}"
    return f"one of {', '.join(map(str, divisors))}"


@contextmanager
def naming(place: str, note: str = "") -> Iterator[None]:
    """Put a place before the message of a user's mistake, and a note after it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}{note}") from None


@contextmanager
def naming_overrides(source: str, overrides: Iterable[str]) -> Iterator[None]:
    """Name the command line, not the config file, as the place of a mistake in an override.

    Args:
        source: place that messages begin with.
        overrides: dotted names of the settings that the command line gives.
    """
    names = [*overrides]
    if any(name.startswith("model.") for name in names):  # they are joined to the file's name
        names.append("model.architecture")
    try:
        yield
    except UserError as error:
        lines = [_moved(line, source, overrides=names) for line in str(error).splitlines()]
        raise UserError("\n".join(lines)) from None


def _moved(line: str, source: str, *, overrides: Iterable[str]) -> str:
    rest = line.removeprefix(f"{source}: ")
    path = f"{rest.replace(': ', '.')}."
    key, _, message = rest.partition(": ")
    is_new = message.startswith("unknown key")  # a section that only the command line gives
    words = {*re.findall(r"\w+", rest.partition(";")[0])}  # without the remedy

    def is_named(name: str) -> bool:
        section, _, setting = name.rpartition(".")
        return (
            path.startswith(f"{name}.")
            or (is_new and name.startswith(f"{key}."))
            or (path.startswith(f"{section}.") and setting in words)  # two that do not fit together
        )

    is_override = any(map(is_named, overrides))
    return f"command line: {rest}" if rest != line and is_override else line


FAILURE_VARIABLE = "JOB_FAILURE_FILE"
"""Environment variable with a file that prevents a retry of the job."""
FAULTY_HOSTS_VARIABLE = "JOB_FAULTY_HOSTS_FILE"
"""Environment variable with a file of hosts that the next job is not to use."""
RESTART_VARIABLE = "TOKAMAKE_ERROR_FILE"
"""Environment variable with a file that prevents a restart of the ranks in the same job."""


def note_failure(error: Exception) -> None:
    """Tell who started this process that a restart at once would not help.

    The executors for PBS and Slurm name a file in JOB_FAILURE_FILE; work that would fail again in
    the same way creates it, and the job is not retried. A text in it is the reason that they print.
    A temporary error is retried, but not within the same job (`runtime/restarts.py`).
    """
    _note(RESTART_VARIABLE)
    if not isinstance(error, TemporaryError):
        _note(FAILURE_VARIABLE)


def note_wanted_end() -> None:
    """Tell the executors for PBS and Slurm not to retry this job: a person ended its work."""
    _note(FAILURE_VARIABLE, "it was asked to stop, so there is no retry")


def note_faulty_hosts(hosts: Iterable[str]) -> None:
    """Tell the executor for Slurm which hosts seem faulty: the next job does not use them."""
    if path := os.environ.get(FAULTY_HOSTS_VARIABLE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{host}\n" for host in hosts)


def _note(variable: str, reason: str = "") -> None:
    if path := os.environ.get(variable):
        with suppress(OSError):
            Path(path).write_text(reason, encoding="utf-8")


def reason_of(error: Exception) -> str:
    """First line of an error's message, or the name of its class if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def of_system(error: OSError) -> str:
    """Message of an error of the operating system: the file and the reason."""
    prefix = f"{error.filename}: " if error.filename else ""
    return f"{prefix}{error.strerror or str(error) or type(error).__name__}"
