"""Stand-ins for programs of a site, and launch scripts that find them."""

import shutil
import subprocess
from pathlib import Path

from tests.support.paths import ROOT


def program(folder: Path, name: str, says: str = "") -> Path:
    """Write a program that prints a word, its name by default, and its arguments, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {says or name} "$@"\n')
    (folder / name).chmod(0o755)
    return folder


def rank(
    profile: str, *path: Path, profiles: Path = ROOT / "profiles", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a launch script with folders on PATH, beside the tools that it needs."""
    tools = path[0].parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "dirname", "readlink"):
        (tools / name).unlink(missing_ok=True)
        (tools / name).symlink_to(shutil.which(name) or name)
    return subprocess.run(
        [profiles / profile / "launch.sh", "1", "2", "true"],
        env={"PATH": ":".join(map(str, (*path, tools))), "PBS_NODEFILE": "hosts", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
