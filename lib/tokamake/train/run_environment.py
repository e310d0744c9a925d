"""The environment of a training job, beside train.json: code, modules, packages, variables."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from typing import Any

from tokamake import files
from tokamake.config.resolved_run import Run

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|LICENSE|BASH_FUNC", re.I)
"""Names of variables that may hold a secret."""
_CREDENTIALS = re.compile(r"(\w+://)[^/\s]*@")


def write_environment(run: Run) -> None:
    """Write the environment of a job that begins to train; the last job's file stays."""
    files.write_json(run.output.with_name("environment.json"), environment(os.environ))


def environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Describe this process, with variables but no secrets: by name, or in addresses."""
    commit = _git("rev-parse", "HEAD")
    return {
        "commit": commit,
        "changed_files": commit and (_git("status", "--porcelain", "-uno") or "").splitlines(),
        "modules": [each for each in variables.get("LOADEDMODULES", "").split(":") if each],
        "python": platform.python_version(),
        "packages": _packages(),
        "variables": {
            name: _CREDENTIALS.sub(r"\1***@", value)
            for name, value in sorted(variables.items())
            if name == "PWD" or not _SECRET.search(name)
        },
    }


@cache
def _packages() -> dict[str, str]:
    """Version of each installed package."""
    texts = [each.metadata for each in distributions()]  # parses the file, a page of text, once
    return dict(sorted((text["Name"].lower(), text["Version"]) for text in texts))


def _git(*arguments: str) -> str | None:
    """Output of git in the working directory; None if it is no checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["git", *arguments], stderr=subprocess.DEVNULL, text=True, timeout=30
        ).strip()
    return None
