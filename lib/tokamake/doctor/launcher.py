"""Read the last command of a launch script, and check that its mpiexec accepts the options."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tokamake.doctor.programs import ProgramOutput, ask
from tokamake.doctor.result import Result, ok, warning, wrong

SECONDS = 120.0
"""Time limit. Modules and imports can be slow on a shared file system."""

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
"""Bash script: print path, version and help of mpiexec, and its response to each option.

No command names a program to run, so mpiexec starts no ranks.
"""


@dataclass(frozen=True)
class Launcher:
    """The last command of a launch script."""

    name: str = ""
    """mpiexec or srun; empty if unknown."""
    options: tuple[str, ...] = ()
    """Names of its options, with dashes."""
    script: Path | None = None
    setup: str = ""
    """Lines of the launch script that load modules and set `mpiexec`."""


def read_launcher(script: Path) -> Launcher:
    """Read the last command of a launch script. Follow `exec` of another launch script."""
    text = re.sub(r"(^|\s)#.*", "", script.read_text(encoding="utf-8", errors="replace"))
    lines = re.findall(r"^(?:\. |mpiexec=).*", text, re.M)
    setup = "\n".join(lines).replace('"$0"', shlex.quote(str(script)))
    if target := re.search(r'exec "\$\(dirname "\$0"\)/([\w./-]+\.sh)"', text):
        launcher = read_launcher(Path(os.path.normpath(script.parent / target[1])))
        return replace(launcher, setup=f"{setup}\n{launcher.setup}")
    command = re.search(r'^\s*exec\s+"?\$?(mpiexec|srun)\b((?:\\\n|.)*)', text, re.M)
    if not command:
        return Launcher()
    options = re.findall(r"\s(--?[a-z][\w-]*)", command[2].partition('"$@"')[0])
    return Launcher(command[1], tuple(dict.fromkeys(options)), script, setup)


def ask_in_job(launcher: Launcher, script: str, *arguments: str, seconds: float) -> ProgramOutput:
    """Run a bash script in the environment of a launch script: its modules, and PATH of jobs."""
    programs = Path(sys.executable).parent  # Jobs have it first on PATH.
    text = f'PATH="$1:$PATH"; shift\n{launcher.setup}\n{script}'
    command = ["bash", "-c", text, str(launcher.script), str(programs), *arguments]
    return ask(command, seconds=seconds)


def check_launcher(launcher: Launcher, *, seconds: float = SECONDS) -> list[Result]:
    """Check that the mpiexec of a job accepts the options of the launch script."""
    if launcher.name != "mpiexec":
        return []
    answer = ask_in_job(launcher, _QUESTIONS, *launcher.options, seconds=seconds)
    if answer.fault:
        remedy = "ranks cannot start on such a node; check again on a compute node"
        return [warning("mpiexec", f"not known: {answer.fault}", remedy)]
    path, version, listed, *answers = answer.output.split("\0")[1:]
    responses = dict(zip(launcher.options, answers, strict=True))
    return [
        mpiexec_result(
            launcher, f"{path}, {_first_line(version)}", help_text=listed, responses=responses
        )
    ]


def mpiexec_result(
    launcher: Launcher, value: str, *, help_text: str, responses: Mapping[str, str]
) -> Result:
    """Return the result for the mpiexec of a launch script; `value`: its path and version.

    `responses`: option of the launch script → output of mpiexec with this option.
    """
    refused = [option for option in launcher.options if _refuses(option, responses[option])]
    if refused:
        message = f"{value}; refuses {', '.join(refused)} of {launcher.script}"
        remedy = "load the module of the site's mpiexec, or change these options"
        return wrong("mpiexec", message, remedy)
    known = set(re.findall(r"(?<![\w-])--?([a-z][\w-]*)", help_text))
    unlisted = [option for option in launcher.options if option.lstrip("-") not in known]
    if unlisted:
        return ok("mpiexec", f"{value}; not known: whether it takes {', '.join(unlisted)}")
    return ok("mpiexec", f"{value}; takes the options of {launcher.script}")


def _refuses(option: str, answer: str) -> bool:
    """Whether the answer is the error of Hydra, Open MPI or PALS for an unknown option."""
    name = re.escape(option.lstrip("-"))
    return bool(re.search(rf"un(recognized|known) (option|argument)\W+{name}(?![\w-])", answer))


def _first_line(version: str) -> str:
    """First line of the version text, or the first two for Hydra, whose second has the number."""
    lines = [" ".join(line.split()) for line in version.splitlines() if line.strip()]
    if not lines:
        return "version not known"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
