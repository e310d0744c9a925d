"""Files beside the output folder: train.json, train.STEP.json of a segment, environment.json."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.train import metrics

_PACKAGE = Path(files.__file__).parent
"""Folder of tokamake's code."""
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|LICENSE|BASH_FUNC", re.I)
"""Names of variables that may hold a secret."""
_CREDENTIALS = re.compile(r"(\w+://)[^/\s]*@")


def summary_path(run: Run, step: int) -> Path:
    """File that says that a run has reached a step: train.json for the last one."""
    middle = "" if step == run.train.train_steps else f".{step}"
    return run.output.with_name(f"train{middle}.json")


def write_summary(run: Run, state: ResumeState) -> None:
    """Write where a run stands at a checkpoint, and its metrics until then."""
    tokens = state.consumed_samples * run.train.sequence_length
    # Without the tokens of another run that this one continues.
    run_tokens = tokens - run.consumed_samples * run.train.sequence_length
    records = metrics.read(run.output / metrics.FILE)
    files.write_json(
        summary_path(run, state.step),
        {
            "run": run.run,
            "digest": state.digest,
            "step": state.step,
            **metrics.summary([record for record in records if record["step"] <= state.step]),
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": tokens,
            "seconds": state.seconds,
            "tokens_per_second": run_tokens / state.seconds if state.seconds else 0.0,
            "checkpoint": str(run.output / f"global_step{state.step}"),
            "world_size": state.world_size,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("tokamake", "torch", "deepspeed")},
            },
        },
    )


def write_environment(run: Run) -> None:
    """Write the environment of a job that begins to train; the last job's file stays."""
    files.write_json(run.output.with_name("environment.json"), environment(os.environ))


def environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Describe this process, with variables but no secrets: by name, or in addresses."""
    # A virtual environment in the checkout of other files has no commit of tokamake.
    is_checkout = _git(_PACKAGE, "ls-files", "--error-unmatch", "__init__.py")
    return {
        **_commit(Path()),
        "tokamake": _commit(_PACKAGE) if is_checkout else None,
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


def _commit(folder: Path) -> dict[str, Any]:
    """Commit of the checkout that has a folder, and what has changed there since."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = commit and (_git(folder, "status", "--porcelain", "-uno") or "").splitlines()
    return {"commit": commit, "changed_files": changed}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of git in a folder; None if it is no checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["git", "-C", folder, *arguments], stderr=subprocess.DEVNULL, text=True, timeout=30
        ).strip()
    return None
