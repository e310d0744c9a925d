"""Reads the last command of a launch script, and asks its mpiexec whether it takes the options."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokamake.doctor.programs import Answer, ask
from tokamake.doctor.result import Result, ok, warning, wrong

SECONDS = 120.0
"""For modules and imports, which can be slow from a shared disk."""

_QUESTIONS = """
mpiexec=${mpiexec-$(type -P mpiexec)} || echo "$0: no mpiexec on PATH" >&2
[ -n "$mpiexec" ] || exit 2
exec 2>&1
printf '\\0%s\\0' "$mpiexec"
"$mpiexec" --version; printf '\\0'
"$mpiexec" --help
for option; do printf '\\0'; "$mpiexec" "$option" --version; done
exit 0
"""
"""No question names a program, so none is started."""


@dataclass(frozen=True)
class Launcher:
    """The last command of a launch script."""

    name: str = ""
    """mpiexec, srun, or nothing known."""
    options: tuple[str, ...] = ()
    """Names of its options, with their dashes."""
    script: Path | None = None
    """Where it stands."""
    setup: str = ""
    """Lines of the launch script that load the site's modules and choose the mpiexec."""


def read_launcher(script: Path) -> Launcher:
    """Read the last command of a launch script, or of the launch script that it executes."""
    text = re.sub(r"(^|\s)#.*", "", script.read_text(encoding="utf-8", errors="replace"))
    lines = re.findall(r"^(?:\. |mpiexec=).*", text, re.M)
    setup = "\n".join(lines).replace('"$0"', shlex.quote(str(script)))
    if other := re.search(r'exec "\$\(dirname "\$0"\)/([\w./-]+\.sh)"', text):
        found = read_launcher(Path(os.path.normpath(script.parent / other[1])))
        return replace(found, setup=f"{setup}\n{found.setup}")
    command = re.search(r'^\s*exec\s+"?\$?(mpiexec|srun)\b((?:\\\n|.)*)', text, re.M)
    if not command:
        return Launcher()
    options = re.findall(r"\s(--?[a-z][\w-]*)", command[2].partition('"$@"')[0])
    return Launcher(command[1], tuple(dict.fromkeys(options)), script, setup)


def ask_in_job(launcher: Launcher, script: str, *arguments: str, seconds: float) -> Answer:
    """Run a script of bash as a launch script would: with its modules, and PATH as jobs have it."""
    programs = Path(sys.executable).parent  # first on PATH in jobs
    text = f'PATH="$1:$PATH"; shift\n{launcher.setup}\n{script}'
    command = ["bash", "-c", text, str(launcher.script), str(programs), *arguments]
    return ask(command, seconds=seconds)


def check_launcher(launcher: Launcher, *, seconds: float = SECONDS) -> list[Result]:
    """Which mpiexec a job runs, and whether it takes the options of the launch script."""
    if launcher.name != "mpiexec":
        return []
    answer = ask_in_job(launcher, _QUESTIONS, *launcher.options, seconds=seconds)
    if answer.fault:
        remedy = "ranks cannot start where this is so; check again on a compute node"
        return [warning("mpiexec", f"not known: {answer.fault}", remedy)]
    path, version, listed, *answers = answer.output.split("\0")[1:]
    said = dict(zip(launcher.options, answers, strict=True))
    return [judge_mpiexec(launcher, f"{path}, {_first(version)}", listed, said)]


def judge_mpiexec(launcher: Launcher, value: str, listed: str, said: Mapping[str, str]) -> Result:
    """Result for the mpiexec of a launch script.

    Args:
        launcher: the last command of that script.
        value: which mpiexec it is.
        listed: what it prints as its help.
        said: what it prints when it is given an option of the script, by option.
    """
    refused = [option for option in launcher.options if _refuses(option, said[option])]
    if refused:
        told = f"{value}; refuses {', '.join(refused)} of {launcher.script}"
        remedy = "load the module of the site's own mpiexec, or change these options"
        return wrong("mpiexec", told, remedy)
    known = set(re.findall(r"(?<![\w-])--?([a-z][\w-]*)", listed))
    unlisted = [option for option in launcher.options if option.lstrip("-") not in known]
    if unlisted:
        return ok("mpiexec", f"{value}; not known: whether it takes {', '.join(unlisted)}")
    return ok("mpiexec", f"{value}; takes the options of {launcher.script}")


def _refuses(option: str, answer: str) -> bool:
    """Whether an answer is that of Hydra, Open MPI or PALS to an option that it does not know."""
    name = re.escape(option.lstrip("-"))
    return bool(re.search(rf"un(recognized|known) (option|argument)\W+{name}(?![\w-])", answer))


def _first(version: str) -> str:
    """The first line of what an mpiexec says of its version; Hydra has the number in the second."""
    lines = [" ".join(line.split()) for line in version.splitlines() if line.strip()]
    if not lines:
        return "version not known"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
