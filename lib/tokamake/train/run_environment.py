"""The environment of a training job, beside train.json: code, modules, packages, variables."""

import os
import platform
import re
import subprocess
from importlib.metadata import distributions
from typing import Any

from tokamake import files
from tokamake.config.resolved_run import Run

FILE = "environment.json"
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|LICENSE|BASH_FUNC", re.I)
"""Names of variables that may hold a secret."""
_CREDENTIALS = re.compile(r"(\w+://)[^/\s]*@")


def write_environment(run: Run) -> None:
    """Write the environment of a job that begins to train a run; the last job's file stays."""
    files.write_json(run.output.with_name(FILE), environment(os.environ))


def environment(variables: "os._Environ[str] | dict[str, str]") -> dict[str, Any]:
    """Describe this process.

    Args:
        variables: of the environment. Those whose name may be that of a secret are left out, as are
            user and password of addresses.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "commit": commit,
        "changed_files": commit and (_git("status", "--porcelain", "-uno") or "").splitlines(),
        "modules": [each for each in variables.get("LOADEDMODULES", "").split(":") if each],
        "python": platform.python_version(),
        "packages": {each.name: each.version for each in sorted(distributions(), key=_name)},
        "variables": {
            name: _CREDENTIALS.sub(r"\1***@", value)
            for name, value in sorted(variables.items())
            if name == "PWD" or not _SECRET.search(name)
        },
    }


def _name(distribution: Any) -> str:
    return str(distribution.name).lower()


def _git(*arguments: str) -> str | None:
    """Output of git in the working directory; None if it is no checkout."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
